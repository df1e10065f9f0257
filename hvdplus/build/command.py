"""Pure: from a plan to the environment and the command that carry it out, or to a script that does."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from hvdplus.build import HOROVOD_VERSION
from hvdplus.build.compiler import wrapper
from hvdplus.build.recipe import Plan

# Passed on to Horovod's build when set; every other HOROVOD_ variable is dropped, since a wheel in the cache
# must be the one its key says.
KEPT_VARIABLES = ("HOROVOD_BUILD_CUDA_CC_LIST",)


def build_environment(plan: Plan, work: Path) -> dict[str, str]:
    """Return the variables a build gets on top of the user's, with generated files under `work`."""
    with_mpi = {"HOROVOD_WITH_MPI": "1"} if plan.mpi else {"HOROVOD_WITHOUT_MPI": "1"}
    return {
        "CXX": str(work / "cxx"),
        "MAKEFLAGS": f"-j{plan.jobs}",
        "CMAKE_GENERATOR": "Unix Makefiles",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # or cmake 4 refuses the gloo that Horovod bundles
        "HOROVOD_WITH_PYTORCH" if plan.torch else "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITH_TENSORFLOW" if plan.tensorflow else "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **with_mpi,
        **cuda_environment(plan),
        **nccl_environment(plan, work),
    }


def cuda_environment(plan: Plan) -> dict[str, str]:
    """Point Horovod and PyTorch to one and the same toolkit."""
    return {"HOROVOD_CUDA_HOME": plan.cuda.home, "CUDA_HOME": plan.cuda.home} if plan.cuda else {}


def nccl_environment(plan: Plan, work: Path) -> dict[str, str]:
    """Point Horovod to NCCL; `work/nccl` holds the name `libnccl.so` that the wheel lacks."""
    if plan.nccl is None:
        return {}
    return {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_NCCL_INCLUDE": plan.nccl.include,
        "HOROVOD_NCCL_LIB": str(work / "nccl"),
        "HOROVOD_NCCL_LINK": "SHARED",
    }


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the user's variables without those that would steer Horovod's build past the plan."""
    return {name: value for name, value in environ.items() if not name.startswith("HOROVOD_") or name in KEPT_VARIABLES}


def build_command(python: str, wheels: Path) -> list[str]:
    """Return the pip command that makes the wheel.

    Without `--no-cache-dir` pip would hand out a wheel it once built for another version of torch: its own
    cache knows nothing but Horovod's version.
    """
    return [
        python,
        "-m",
        "pip",
        "wheel",
        f"horovod=={HOROVOD_VERSION}",
        "--verbose",
        "--no-deps",
        "--no-build-isolation",
        "--no-cache-dir",
        "--no-binary",
        "horovod",
        "--wheel-dir",
        str(wheels),
    ]


def wrapper_text(plan: Plan) -> str:
    """Return the compiler wrapper of this plan."""
    # Python's lib directory, seen from site-packages/horovod/<framework>/: a cached wheel then finds the MPI
    # of the environment it is installed in, not of the one it was built in.
    search = "$ORIGIN/../../../.." if plan.mpi and plan.mpi.in_environment else None
    return wrapper(plan.compiler.command, plan.standard, plan.without_xla, search)


def as_script(plan: Plan, python: str, path: str, work: Path = Path("/tmp/horovod-build")) -> str:
    """Return the whole build as a shell script that does the same by hand."""
    setting = [f"export {name}={shlex.quote(value)}" for name, value in build_environment(plan, work).items()]
    first = [shlex.join([python, "-m", "pip", "install", *plan.requirements])] if plan.requirements else []
    library = shlex.quote(plan.nccl.library) if plan.nccl else ""
    link = [f"mkdir -p {work}/nccl", f"ln -sf {library} {work}/nccl/libnccl.so"] if plan.nccl else []
    return "\n".join(
        [
            *first,
            f"mkdir -p {work}",
            *link,
            f"cat > {work}/cxx <<'END'",
            wrapper_text(plan) + "END",
            f"chmod +x {work}/cxx",
            f"export PATH={shlex.quote(path)}:$PATH",
            *setting,
            shlex.join(build_command(python, work / "wheels")),
            f"{shlex.quote(python)} -m pip install --no-deps --force-reinstall {work}/wheels/horovod-*.whl",
        ]
    )
