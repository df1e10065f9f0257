"""The Keras adapter on 2 ranks, on its TensorFlow and torch backends, with Horovod and with mpi4py alone."""

import harness
import numpy as np
import parity
import pytest

TENSORFLOW, TORCH, MPI = "keras_scenarios.py", "keras_torch_scenarios.py", "keras_mpi_scenarios.py"


@pytest.mark.parametrize("scenario", harness.names(TENSORFLOW))
@pytest.mark.parametrize("module", [TENSORFLOW, TORCH])
def test_scenario(module, scenario):
    harness.scenarios("horovodrun-gloo", 2, module).result(scenario)


@pytest.mark.parametrize("scenario", harness.names(MPI))
def test_scenario_without_horovod(scenario):
    harness.scenarios("mpirun-mpi4py", 2, MPI).result(scenario)


@pytest.mark.parametrize("case", parity.CASES)
@pytest.mark.parametrize("module", [TENSORFLOW, TORCH])
def test_keras_follows_torch(module, case):
    torch = harness.scenarios("horovodrun-gloo", 2, TORCH).result("scenario_parity_torch")
    keras = harness.scenarios("horovodrun-gloo", 2, module).result("scenario_parity")
    assert keras[0][case] == keras[1][case]
    assert np.abs(np.subtract(torch[0][case], keras[0][case])).max() < parity.CODECS[case.split("|")[1]]
