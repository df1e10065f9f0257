"""Finds what a build of Horovod would meet here, without importing a framework."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

from hvdplus.build.found import Compiler, Cuda, Machine, Mpi, Nccl, Probe, TensorFlow, Torch

TENSORFLOW_DISTRIBUTIONS = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-gpu",
    "tf-nightly",
    "intel-tensorflow",
    "tensorflow-rocm",
    "tensorflow-aarch64",
)
PACKAGES = (
    "pip",
    "setuptools",
    "wheel",
    "packaging",
    "cmake",
    "cloudpickle",
    "psutil",
    "pyyaml",
    "cffi",
    "horovod",
)
ARCH_FLAGS = ("avx", "f16c", "fma")


def probe(environ: Mapping[str, str] = os.environ) -> Probe:
    """Look at the running interpreter's environment and at the machine."""
    path = search_path(environ)
    packages = installed_packages(PACKAGES)
    cuda = find_cuda(environ, path)
    return Probe(
        machine=find_machine(),
        torch=find_torch(),
        tensorflow=find_tensorflow(),
        mpi=find_mpi(environ, path),
        compiler=find_compiler(environ, path),
        cmake=find_cmake(path, packages),
        make=shutil.which("make", path=path),
        cuda=cuda,
        nccl=find_nccl(environ, cuda),
        packages=packages,
    )


def scripts_directory() -> str:
    """Return the directory in which this environment keeps its commands."""
    return sysconfig.get_path("scripts")


def search_path(environ: Mapping[str, str]) -> str:
    """Return PATH with this environment's commands first, whether or not it is activated."""
    return os.pathsep.join([scripts_directory(), environ.get("PATH", os.defpath)])


def output(command: Iterable[str]) -> str:
    """Return what a short command prints, or nothing if it cannot run."""
    try:
        done = subprocess.run(list(command), capture_output=True, text=True, timeout=20, check=False, errors="replace")
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout + done.stderr


def read(path: Path) -> str:
    """Return a text file's content, or nothing if there is none."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# --- Python packages ----------------------------------------------------------------------------------------


def installed_packages(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found = {name: package_version(name) for name in names}
    return {name: version for name, version in found.items() if version}


def package_version(name: str) -> str | None:
    """Return a distribution's version without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_directory(name: str) -> Path | None:
    """Return where a top-level package lies; finding it does not run it."""
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None


def find_torch() -> Torch | None:
    """Read `torch/version.py` and the C++ standard its main header demands."""
    home = package_directory("torch")
    text = read(home / "version.py") if home else ""
    if home is None or not text:
        return None
    header = read(home / "include" / "ATen" / "ATen.h")
    return parse_torch(text, header)


def parse_torch(version_py: str, aten_h: str = "") -> Torch | None:
    """Turn the text of `torch/version.py` and `ATen/ATen.h` into what the recipe needs."""
    version = assigned(version_py, "__version__")
    if version is None:
        return None
    demanded = re.search(r"#error.*C\+\+(\d\d) or later", aten_h)
    return Torch(
        version,
        cuda=assigned(version_py, "cuda"),
        hip=assigned(version_py, "hip"),
        standard=int(demanded.group(1)) if demanded else None,
    )


def assigned(source: str, name: str) -> str | None:
    """Return the string assigned to a module-level name in Python source, or None."""
    match = re.search(rf"^{name}\s*(?::[^=\n]+)?=\s*['\"]([^'\"]+)['\"]", source, re.MULTILINE)
    return match.group(1) if match else None


def find_tensorflow() -> TensorFlow | None:
    """Find whichever distribution provides TensorFlow."""
    home = package_directory("tensorflow")
    found = installed_packages(TENSORFLOW_DISTRIBUTIONS)
    if home is None or not found:
        return None
    distribution, version = next(iter(found.items()))
    return TensorFlow(version, distribution, cuda=is_cuda_build(read(home / "python/platform/build_info.py")))


def is_cuda_build(build_info: str) -> bool:
    """Say whether the text of TensorFlow's `build_info.py` describes a CUDA build."""
    return re.search(r"'is_cuda_build',\s*True", build_info) is not None


# --- MPI, compiler, cmake -----------------------------------------------------------------------------------


def find_mpi(environ: Mapping[str, str], path: str) -> Mpi | None:
    """Find `$MPICXX`, or the first `mpicxx` (this environment's own before the system's)."""
    mpicxx = shutil.which(environ.get("MPICXX", "mpicxx"), path=path)
    if mpicxx is None:
        return None
    home = str(Path(mpicxx).parent)
    mpirun = shutil.which("mpirun", path=os.pathsep.join([home, path]))
    told = output([mpirun, "--version"]) if mpirun else output([mpicxx, "--showme:version"])
    implementation, version = parse_mpi_version(told)
    return Mpi(implementation, version, mpicxx, mpirun, in_environment=home == scripts_directory())


MPI_VERSIONS = (
    ("openmpi", r"Open MPI\)? v?(\d[\w.]*)"),
    ("openmpi", r"OpenRTE\)? v?(\d[\w.]*)"),
    ("spectrum", r"Spectrum MPI\)? v?(\d[\w.]*)"),
    ("intelmpi", r"Intel\(R\) MPI Library.*?Version (\d[\w.]*)"),
    ("mpich", r"(?:HYDRA build details|MPICH)[\s\S]*?Version:?\s+(\d[\w.]*)"),
)


def parse_mpi_version(told: str) -> tuple[str, str]:
    """Turn what `mpirun --version` prints into (implementation, version).

    >>> parse_mpi_version("mpirun (Open MPI) 5.0.11")
    ('openmpi', '5.0.11')
    """
    for implementation, pattern in MPI_VERSIONS:
        match = re.search(pattern, told)
        if match:
            return implementation, match.group(1)
    return "mpi", "unknown"


def find_compiler(environ: Mapping[str, str], path: str) -> Compiler | None:
    """Find `$CXX`, else g++, c++ or clang++."""
    asked = shlex.split(environ.get("CXX", ""))
    for words in [asked] if asked else [["g++"], ["c++"], ["clang++"]]:
        program = shutil.which(words[0], path=path)
        if program:
            kind, version = parse_compiler_version(output([program, *words[1:], "--version"]))
            return Compiler((program, *words[1:]), kind, version)
    return None


def parse_compiler_version(told: str) -> tuple[str, str]:
    """Turn what a compiler's `--version` prints into (gcc or clang, version).

    >>> parse_compiler_version("g++ (GCC) 8.5.0 20210514 (Red Hat 8.5.0-28)")
    ('gcc', '8.5.0')
    """
    first = told.splitlines()[0] if told else ""
    kind = "clang" if "clang" in first else "gcc"
    match = re.search(r"\d+(?:\.\d+)+", re.sub(r"\([^)]*\)", "", first))
    return kind, match.group() if match else "unknown"


def find_cmake(path: str, packages: Mapping[str, str]) -> str | None:
    """Return the version of the cmake a build would call."""
    program = shutil.which("cmake", path=path)
    if program is None:
        return None
    if "cmake" in packages and str(Path(program).parent) == scripts_directory():
        return packages["cmake"]  # asking the wheel's Python front end costs a tenth of a second
    match = re.search(r"cmake version (\d[\d.]*)", output([program, "--version"]))
    return match.group(1) if match else None


# --- CUDA and NCCL ------------------------------------------------------------------------------------------


def find_cuda(environ: Mapping[str, str], path: str) -> Cuda | None:
    """Find a toolkit by its usual variables, by `nvcc` on PATH, or where it is commonly installed."""
    for home in cuda_homes(environ, path):
        nvcc = home / "bin" / "nvcc"
        if nvcc.is_file():
            match = re.search(r"release (\d+\.\d+)", output([str(nvcc), "--version"]))
            return Cuda(str(home), match.group(1) if match else "unknown")
    return None


def cuda_homes(environ: Mapping[str, str], path: str) -> list[Path]:
    """Return the places to look for a toolkit, most deliberate first."""
    named = [Path(environ[name]) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    program = shutil.which("nvcc", path=path)
    beside = [Path(program).resolve().parent.parent] if program else []
    # `nvcc` may be a small script elsewhere: only a directory that has the headers is a toolkit.
    beside = [home for home in beside if (home / "include" / "cuda_runtime.h").is_file()]
    return [
        *named,
        *beside,
        Path("/usr/local/cuda"),
        *sorted(Path("/usr/local").glob("cuda-*"), reverse=True),
    ]


def find_nccl(environ: Mapping[str, str], cuda: Cuda | None) -> Nccl | None:
    """Find `nccl.h` and a shared library that belongs to it."""
    for home in nccl_homes(environ, cuda):
        header = home / "include" / "nccl.h"
        library = nccl_library(home)
        if header.is_file() and library:
            return Nccl(parse_nccl_version(read(header)), str(header.parent), library)
    return None


def nccl_homes(environ: Mapping[str, str], cuda: Cuda | None) -> list[Path]:
    """Return the places to look for NCCL: named, this environment's wheel, the toolkit, the system."""
    named = [Path(environ[name]) for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME") if environ.get(name)]
    wheel = [Path(place) / "nccl" for place in namespace_directories("nvidia")]
    toolkit = [Path(cuda.home)] if cuda else []
    return [*named, *wheel, *toolkit, Path("/usr")]


def namespace_directories(name: str) -> list[str]:
    """Return every directory of a namespace package."""
    spec = importlib.util.find_spec(name)
    return list(spec.submodule_search_locations or []) if spec else []


def nccl_library(home: Path) -> str | None:
    """Return NCCL's shared library under one directory; the wheel has only `libnccl.so.2`."""
    places = [home / "lib", home / "lib64", *sorted((home / "lib").glob("*-linux-gnu"))]
    found = [
        str(place / name) for place in places for name in ("libnccl.so", "libnccl.so.2") if (place / name).is_file()
    ]
    return found[0] if found else None


def parse_nccl_version(header: str) -> str:
    """Return the version written in `nccl.h`."""
    parts = [re.search(rf"#define\s+NCCL_{part}\s+(\d+)", header) for part in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part.group(1) for part in parts if part) or "unknown"


# --- the machine --------------------------------------------------------------------------------------------


def find_machine() -> Machine:
    """Describe the interpreter and the machine."""
    return Machine(
        python=f"cp{sys.version_info.major}{sys.version_info.minor}",
        arch=architecture(),
        libc="".join(platform.libc_ver()),
        cores=available_cores(),
        memory_gib=available_memory(),
        headers=(Path(sysconfig.get_path("include")) / "Python.h").is_file(),
        managed=is_managed(),
    )


def architecture() -> str:
    """Name the processor, with the vector extensions for which Horovod compiles only if they are here."""
    words = set(re.findall(r"\w+", next(iter(re.findall(r"^flags\s*:(.*)$", read(Path("/proc/cpuinfo")), re.M)), "")))
    return "+".join([platform.machine(), *(flag for flag in ARCH_FLAGS if flag in words)])


def available_cores() -> int:
    """Return how many cores this process may use, which a batch system may have made fewer."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> float:
    """Return the GiB a build may use: what is free, and not more than the control group allows."""
    free = re.search(r"MemAvailable:\s+(\d+) kB", read(Path("/proc/meminfo")))
    limits = [int(free.group(1)) * 1024] if free else []
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = read(Path(name)).strip()
        limits += [int(text)] if text.isdigit() else []
    return min(limits, default=2 * 2**30) / 2**30


def is_managed() -> bool:
    """Say whether this is an operating system's own Python, into which pip refuses to install (PEP 668)."""
    inside = sys.prefix != sys.base_prefix
    return not inside and (Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED").is_file()
