"""Every codec on two ranks, and on four under mpi4py; with Keras, on two."""

import harness
import pytest

MODULE = "codec_scenarios.py"
LAUNCHES = [("horovodrun-gloo", 2), ("mpirun-mpi4py", 2), ("mpirun-mpi4py", 4)]


@pytest.mark.parametrize("scenario", harness.names(MODULE))
@pytest.mark.parametrize(("engine", "ranks"), LAUNCHES)
def test_scenario(engine, ranks, scenario):
    print(harness.scenarios(engine, ranks, MODULE).result(scenario))


@pytest.mark.parametrize("scenario", harness.names("codec_keras_scenarios.py"))
@pytest.mark.parametrize("engine", ["horovodrun-gloo", "mpirun-mpi4py"])
def test_keras_scenario(engine, scenario):
    pytest.importorskip("tensorflow")
    print(harness.scenarios(engine, 2, "codec_keras_scenarios.py").result(scenario))
