"""Checkpoints, changes of layout and of the loss scale: on two and four ranks under mpi4py, in part under Horovod."""

import harness
import pytest

MODULE, GLOO = "state_scenarios.py", "state_gloo_scenarios.py"


@pytest.mark.parametrize("scenario", harness.names(MODULE))
@pytest.mark.parametrize("ranks", [2, 4])
def test_scenario(ranks, scenario):
    harness.scenarios("mpirun-mpi4py", ranks, MODULE).result(scenario)


@pytest.mark.parametrize("scenario", harness.names(GLOO))
def test_scenario_with_horovod(scenario):
    harness.scenarios("horovodrun-gloo", 2, GLOO).result(scenario)
