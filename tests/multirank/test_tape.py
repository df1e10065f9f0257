"""The gradient tape of TensorFlow where nothing was exchanged before."""

import harness
import pytest

MODULE = "tape_scenarios.py"


@pytest.mark.parametrize("scenario", harness.names(MODULE))
@pytest.mark.parametrize("engine", ["mpirun", "mpirun-mpi4py"])
def test_scenario(engine, scenario):
    harness.scenarios(engine, 2, MODULE).result(scenario)
