"""Checks of what is installed: frameworks, Horovod and what it was built for, Keras' wrapper, numba, settings."""

from __future__ import annotations

from hvdplus.build.install import difference
from hvdplus.build.versions import release
from hvdplus.doctor.finding import Verdict, bad, ok, warn
from hvdplus.doctor.machine import Machine, Script
from hvdplus.doctor.script import imports_of_wrapper
from hvdplus.engines import wanted
from hvdplus.errors import HvdplusError
from hvdplus.strategy import Strategy

_INSTALL = "hvdplus install-horovod"
_METADATA = ("pytorch", "tensorflow")
_FRAMEWORK_PARTS = ("cp3", "torch-", "tensorflow", "tf-nightly", "intel-tensorflow")


def frameworks(machine: Machine) -> Verdict:
    """Name the interpreter and the frameworks."""
    found = [f"PyTorch {machine.torch.version}"] if machine.torch else []
    found += [f"TensorFlow {machine.tensorflow.version}"] if machine.tensorflow else []
    found += [f"Keras {machine.packages['keras']}"] if "keras" in machine.packages else []
    here = f"Python {machine.python}"
    if not (machine.torch or machine.tensorflow):
        return bad(f"{here}, but neither PyTorch nor TensorFlow", "pip install torch, or pip install tensorflow")
    return ok(", ".join([here, *found]))


def horovod(machine: Machine) -> Verdict:
    """Say what Horovod was built for, and whether that is what is installed now."""
    version, site = machine.packages.get("horovod"), machine.site
    if version is None or site.horovod is None:
        if site.mpi4py and site.mpi:
            return warn("Horovod is not installed; ranks exchange over mpi4py, in host memory", _INSTALL)
        return bad("neither Horovod nor mpi4py with an MPI is installed, so ranks cannot exchange", _INSTALL)
    stale = _changed_since_build(machine)
    if stale:
        return bad(f"Horovod {version} was built for other versions: {stale}", _INSTALL)
    joins = (["Gloo"] if site.horovod.gloo else []) + ([f"MPI ({site.horovod.mpi})"] if site.horovod.mpi else [])
    built = f"Horovod {version} for {_built_for(machine)}, over {' and '.join(joins) or 'nothing'}"
    if machine.record is None:
        return warn(f"{built}; built by something else, so nobody has checked it", f"{_INSTALL} builds and checks it")
    if not machine.record.checked:
        return warn(f"{built}; not checked yet", f"{_INSTALL} checks it on two ranks")
    return ok(f"{built}; checked on two ranks")


def _changed_since_build(machine: Machine) -> str:
    """Say which framework is another one than Horovod was built for; nothing where all are the same."""
    if machine.record is not None:
        built = [part for part in machine.record.key.split("_") if part.startswith(_FRAMEWORK_PARTS)]
        same = set(built) == set(machine.current)
        return "" if same else difference("_".join(built), "_".join(machine.current))
    now = dict(zip(_METADATA, (machine.torch, machine.tensorflow), strict=True))
    pairs = [(name, machine.built_for.get(name), found.version) for name, found in now.items() if found]
    return ", ".join(f"{name} {old} -> {new}" for name, old, new in pairs if old and old != new)


def _built_for(machine: Machine) -> str:
    if machine.record is None:
        return ", ".join(f"{name} {version}" for name, version in machine.built_for.items() if name in _METADATA) or "?"
    return ", ".join(part for part in machine.record.key.split("_") if part.startswith(_FRAMEWORK_PARTS[1:]))


def keras_wrapper(machine: Machine) -> Verdict | None:
    """Look for Horovod's own Keras wrapper, which exchanges nothing under Keras 3."""
    version = machine.packages.get("keras", "")
    if release(version) < (3,) or _legacy_keras(machine):
        return None
    if machine.script is None:
        if "horovod" not in machine.packages:
            return None
        return ok(f"Keras {version} needs hvdplus.keras, not horovod.keras; --script train.py looks for that")
    places, faults = _wrapper_places(machine.script)
    if places:
        return bad(
            f"{', '.join(places)}: under Keras {version} it trains without exchanging anything",
            "import hvdplus.keras as hvd",
        )
    if faults:
        return bad(", ".join(faults), "correct the line, then ask again")
    return ok(f"{machine.script.name} does not import Horovod's own Keras wrapper")


def _wrapper_places(script: Script) -> tuple[list[str], list[str]]:
    """Return where the wrapper is imported, and which files are no Python."""
    places, faults = [], []
    for name, text in {script.name: script.text, **script.modules}.items():
        try:
            places += [f"{name}:{line} imports {wrapper}" for line, wrapper in imports_of_wrapper(text)]
        except SyntaxError as error:
            faults.append(f"{name}:{error.lineno} is no Python ({error.msg})")
    return places, faults


def _legacy_keras(machine: Machine) -> bool:
    return machine.site.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True") and "tf_keras" in machine.packages


def numba(machine: Machine) -> Verdict:
    """Look for numba, which compiles the codecs' loops on the host."""
    if "numba" in machine.packages:
        return ok(f"numba {machine.packages['numba']}: codecs run compiled on the host")
    return warn("numba is not installed: on the host, codecs are several times slower", "pip install numba")


def settings(machine: Machine) -> Verdict | None:
    """Read hvdplus' own variables as a program would."""
    environ = machine.site.environ
    given = {name: value for name, value in sorted(environ.items()) if name.startswith("HVDPLUS_")}
    if not given:
        return None
    try:
        engine = wanted(environ)
        Strategy.from_env(environ)
    except HvdplusError as error:
        return bad(str(error).rstrip("."), "correct or unset it")
    missing = {"horovod": machine.site.horovod is None, "mpi": not machine.site.mpi4py}
    if missing.get(engine):
        package = "mpi4py" if engine == "mpi" else "Horovod"
        return bad(f"HVDPLUS_ENGINE={engine}, but {package} is not installed", "install it, or unset HVDPLUS_ENGINE")
    return ok(" ".join(f"{name}={value}" for name, value in given.items()))
