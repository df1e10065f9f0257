"""Checkpoints, changes of layout and of the loss scale: on two and four ranks under mpi4py, in part under Horovod."""

import harness
import pytest

MODULE, GLOO = "state_scenarios.py", "state_gloo_scenarios.py"
KERAS, KERAS_TF = "state_keras_scenarios.py", "state_keras_tf_scenarios.py"


@pytest.mark.parametrize("scenario", harness.names(MODULE))
@pytest.mark.parametrize("ranks", [2, 4])
def test_scenario(ranks, scenario):
    harness.scenarios("mpirun-mpi4py", ranks, MODULE).result(scenario)


@pytest.mark.parametrize("scenario", harness.names(GLOO))
def test_scenario_with_horovod(scenario):
    harness.scenarios("horovodrun-gloo", 2, GLOO).result(scenario)


@pytest.mark.parametrize("scenario", harness.names(KERAS))
def test_keras_scenario(scenario):
    pytest.importorskip("keras")
    harness.scenarios("mpirun-mpi4py", 2, KERAS).result(scenario)


@pytest.mark.parametrize("scenario", harness.names(KERAS_TF))
def test_keras_scenario_in_traced_steps(scenario):
    pytest.importorskip("tensorflow")
    harness.scenarios("mpirun-mpi4py", 2, KERAS_TF).result(scenario)
