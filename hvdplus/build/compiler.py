"""The compiler wrapper that makes Horovod's untouched source fit today's headers."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

# This file's body is behind `#if TENSORFLOW_VERSION >= 2006000000`: with an older number it compiles empty.
XLA_FILE = "xla_mpi_ops.cc"
XLA_OFF = "-UTENSORFLOW_VERSION -DTENSORFLOW_VERSION=2005000000"

TEMPLATE = """\
#!/bin/sh
# Made by `hvdplus install-horovod`: the real compiler, with what Horovod's build files get wrong put right.
first=
standard={standard}
last=
for word in "$@"; do
  case "$word" in
{cases}    -D__CUDACC__|-D__CUDA_ARCH*) standard=;;
  esac
done
exec {compiler} $first "$@" $standard -Wfatal-errors $last
"""


def wrapper(compiler: Sequence[str], standard: int, without_xla: bool, library_path: str | None = None) -> str:
    """Return a shell script that calls `compiler` in C++`standard`.

    The standard is appended because the last `-std` wins and Horovod's CMakeLists.txt sets an older one; but
    not where nvcc calls, whose own parser then reads what this compiler has preprocessed. `-Wfatal-errors`
    ends a hopeless build in seconds. `library_path` is put first among the places where a shared library
    looks for the libraries it needs.
    """
    cases = [case(f"*{XLA_FILE}", "last", XLA_OFF)] if without_xla else []
    if library_path:
        cases.append(case("-shared", "first", f"-Wl,-rpath,{library_path}"))
    return TEMPLATE.format(cases="".join(cases), compiler=shlex.join(compiler), standard=f"-std=c++{standard}")


def case(pattern: str, variable: str, value: str) -> str:
    """Return one arm of the script's `case`."""
    return f"    {pattern}) {variable}={shlex.quote(value)};;\n"


def write_wrapper(path: Path, text: str) -> Path:
    """Write the script and make it executable."""
    path.write_text(text)
    path.chmod(0o755)
    return path
