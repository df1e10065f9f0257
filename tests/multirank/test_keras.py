"""The Keras adapter on 2 ranks, on its TensorFlow and torch backends, with Horovod and with mpi4py alone."""

import harness
import numpy as np
import parity
import pytest

TENSORFLOW, TORCH = "keras_scenarios.py", "keras_torch_scenarios.py"
LAUNCHES = [("horovodrun-gloo", TENSORFLOW), ("horovodrun-gloo", TORCH), ("mpirun-mpi4py", TENSORFLOW)]


@pytest.mark.parametrize("scenario", harness.names(TENSORFLOW))
@pytest.mark.parametrize(("engine", "module"), LAUNCHES)
def test_scenario(engine, module, scenario):
    harness.scenarios(engine, 2, module).result(scenario)


@pytest.mark.parametrize("case", parity.CASES)
@pytest.mark.parametrize(("engine", "module"), LAUNCHES)
def test_keras_follows_torch(engine, module, case):
    torch = harness.scenarios("horovodrun-gloo", 2, TORCH).result("scenario_parity_torch")
    keras = harness.scenarios(engine, 2, module).result("scenario_parity")
    assert keras[0][case] == keras[1][case]
    assert np.abs(np.subtract(torch[0][case], keras[0][case])).max() < parity.CODECS[case.split("|")[1]]
