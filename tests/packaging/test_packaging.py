"""What is shipped: the wheel's contents, what an import pulls in, what is exported, and an install from the wheel."""

import importlib
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import hvdplus

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "tensorflow", "keras", "horovod", "mpi4py", "numba")


def python(*argv, executable=sys.executable, **options):
    done = subprocess.run([str(executable), *argv], capture_output=True, text=True, timeout=240, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT))
    return next(folder.glob("*.whl"))


def test_the_wheel_has_every_module_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    packages = [ROOT / "hvdplus", *sorted((ROOT / "integrations").glob("hvdplus_*"))]
    expected = {
        str(path.relative_to(package.parent))
        for package in packages
        for path in package.rglob("*")
        if path.suffix in (".py", ".typed") and "__pycache__" not in path.parts
    }
    assert names == expected
    assert {"hvdplus/py.typed", "hvdplus_torch/py.typed", "hvdplus/build/recipe.py"} <= names


def test_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    text = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode()
    assert f"Version: {hvdplus.__version__}" in text
    assert "License-Expression: Apache-2.0" in text
    required = {
        line.split()[1] for line in text.splitlines() if line.startswith("Requires-Dist") and "extra" not in line
    }
    assert not any(heavy in line for line in required for heavy in HEAVY), "frameworks are the user's choice"


@pytest.mark.parametrize("module", ["hvdplus", "hvdplus.cli", "hvdplus.testing"])
def test_import_pulls_in_no_framework(module):
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert python("-c", code).strip() == "[]"


def test_the_torch_facade_pulls_in_torch_alone():
    code = f"import sys, hvdplus.torch; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert python("-c", code).strip() == "['torch']"


def test_exports():
    for name in hvdplus.__all__:
        assert getattr(hvdplus, name) is not None
    facade = importlib.import_module("hvdplus.torch")
    for name in facade.__all__:
        assert getattr(facade, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        facade.nonsense  # noqa: B018


def test_install_in_a_bare_environment(wheel, tmp_path):
    """Without any framework: the core works, and what needs one says so in a sentence."""
    venv.create(tmp_path / "bare", with_pip=True)
    bare = tmp_path / "bare" / "bin" / "python"
    python("-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel), executable=bare)
    code = "import hvdplus; print(hvdplus.Strategy.parse('fp16,accumulate=2').accumulate, hvdplus.discover({}).size)"
    assert python("-c", code, executable=bare, cwd=tmp_path).split() == ["2", "1"]
    assert "install-horovod" in python("-m", "hvdplus.cli", "--help", executable=bare, cwd=tmp_path)
    code = "import hvdplus\ntry: hvdplus.wrap(object())\nexcept hvdplus.StrategyError as error: print(error)"
    assert "not an optimizer" in python("-c", code, executable=bare, cwd=tmp_path)
