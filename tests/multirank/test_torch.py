"""The PyTorch adapter on 2 and 4 ranks, under horovodrun (Gloo and MPI), mpirun with Horovod, and mpi4py alone."""

import harness
import pytest

MODULE = "torch_scenarios.py"
LAUNCHES = [
    ("horovodrun-gloo", 2),
    ("mpirun", 2),
    ("mpirun-mpi4py", 2),
    ("horovodrun-gloo", 4),
    ("mpirun", 4),
    ("mpirun-mpi4py", 4),
]


@pytest.mark.parametrize("scenario", harness.names(MODULE))
@pytest.mark.parametrize(("engine", "ranks"), LAUNCHES)
def test_scenario(engine, ranks, scenario):
    harness.scenarios(engine, ranks, MODULE).result(scenario)
