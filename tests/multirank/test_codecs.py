"""Every codec on two ranks, and on four under mpi4py."""

import harness
import pytest

MODULE = "codec_scenarios.py"
LAUNCHES = [("horovodrun-gloo", 2), ("mpirun-mpi4py", 2), ("mpirun-mpi4py", 4)]


@pytest.mark.parametrize("scenario", harness.names(MODULE))
@pytest.mark.parametrize(("engine", "ranks"), LAUNCHES)
def test_scenario(engine, ranks, scenario):
    print(harness.scenarios(engine, ranks, MODULE).result(scenario))
