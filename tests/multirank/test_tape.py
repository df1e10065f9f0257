"""The gradient tape of TensorFlow where nothing was exchanged before."""

import harness
import pytest

MODULE = "tape_scenarios.py"


@pytest.mark.parametrize("scenario", harness.names(MODULE))
@pytest.mark.parametrize(
    ("engine", "ranks"), [("horovodrun-gloo", 2), ("horovodrun-gloo", 3), ("mpirun", 2), ("mpirun-mpi4py", 2)]
)
def test_scenario(engine, ranks, scenario):
    harness.scenarios(engine, ranks, MODULE).result(scenario)
