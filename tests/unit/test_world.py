"""Tests of rank discovery: one a launcher, one a pitfall, on plain mappings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdplus.errors import LaunchError
from hvdplus.world import MPI_LAUNCHERS, Place, World, clean_env, discover, places, tasks_per_node, variables

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_UNIVERSE_SIZE": "64",
}
HOROVODRUN = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
    "HOROVOD_CONTROLLER": "gloo",
}
SLURM_STEP = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
SLURM_BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "4"}
TORCH_ENV = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
TORCHRUN = TORCH_ENV | {"TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "1", "ROLE_RANK": "5", "ROLE_WORLD_SIZE": "8"}
ALONE = World(0, 1, 0, 1, "none")

LAUNCHERS = {
    "horovodrun": (HOROVODRUN, World(3, 4, 1, 2, "horovodrun")),
    "Open MPI": (OPENMPI, World(3, 4, 1, 2, "openmpi")),
    "MPICH": ({"PMI_RANK": "3", "PMI_SIZE": "4"}, World(3, 4, None, None, "mpich")),
    "Intel MPI": (
        {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        World(3, 4, 1, 2, "mpich"),
    ),
    "MVAPICH2": (
        {
            "MV2_COMM_WORLD_RANK": "3",
            "MV2_COMM_WORLD_SIZE": "4",
            "MV2_COMM_WORLD_LOCAL_RANK": "1",
            "MV2_COMM_WORLD_LOCAL_SIZE": "2",
        },
        World(3, 4, 1, 2, "mvapich2"),
    ),
    "Platform MPI": (
        {"MPI_RANKID": "3", "MPI_NRANKS": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        World(3, 4, 1, 2, "platform-mpi"),
    ),
    "Cray MPICH": (
        {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"},
        World(3, 4, 1, 2, "mpich"),
    ),
    "Cray PALS": (
        {"PALS_RANKID": "3", "PALS_SIZE": "4", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"},
        World(3, 4, 1, 2, "pals"),
    ),
    "Slurm step": (SLURM_STEP, World(3, 4, 1, 2, "slurm")),
    "torchrun": (TORCHRUN, World(5, 8, 1, 4, "torchrun")),
    "torch variables set by hand": (TORCH_ENV, World(5, 8, 1, 4, "torch-env")),
    "jsrun": (
        {"JSM_NAMESPACE_RANK": "3", "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_LOCAL_RANK": "1"},
        World(3, 4, 1, None, "jsrun"),
    ),
    "Flux": (
        {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2"},
        World(3, 4, 1, None, "flux"),
    ),
    "Kubeflow MPIJob": (
        OPENMPI | {"K_MPI_JOB_ROLE": "worker", "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile"},
        World(3, 4, 1, 2, "openmpi"),
    ),
    "Kubeflow launcher pod": ({"K_MPI_JOB_ROLE": "launcher", "OMPI_MCA_orte_keep_fqdn_hostnames": "true"}, ALONE),
    "SageMaker": (OPENMPI | {"SM_HOSTS": '["a","b"]', "SM_CURRENT_HOST": "b"}, World(3, 4, 1, 2, "openmpi")),
    "override": (
        OPENMPI | {"HVDPLUS_RANK": "6", "HVDPLUS_SIZE": "9", "HVDPLUS_LOCAL_RANK": "0", "HVDPLUS_LOCAL_SIZE": "3"},
        World(6, 9, 0, 3, "override"),
    ),
    "nobody": ({"PATH": "/bin", "HOME": "/"}, ALONE),
}


@pytest.mark.parametrize(("environ", "world"), LAUNCHERS.values(), ids=LAUNCHERS)
def test_launcher(environ, world):
    assert discover(environ) == world


PITFALLS = {
    "batch script without srun is no rank": (SLURM_BATCH, ALONE),
    "salloc shell is no rank": ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}, ALONE),
    "interactive srun is a step of one task": (
        SLURM_BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        World(0, 1, 0, 1, "slurm"),
    ),
    "the job's number of tasks is not the step's": (
        SLURM_STEP | {"SLURM_PROCID": "1", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "2"},
        World(1, 2, 1, 2, "slurm"),
    ),
    "nodes are not equally full": (
        SLURM_STEP
        | {"SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3", "SLURM_STEP_NUM_TASKS": "7"}
        | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1"},
        World(6, 7, 0, 1, "slurm"),
    ),
    "step without a node list": (
        {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"},
        World(1, 2, 1, None, "slurm"),
    ),
    "mpirun inside a Slurm step": (
        SLURM_STEP | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"} | OPENMPI,
        World(3, 4, 1, 2, "openmpi"),
    ),
    "mpirun inside a batch script": (SLURM_BATCH | OPENMPI, World(3, 4, 1, 2, "openmpi")),
    "mpirun whose daemon has the step's PMI variables": (
        SLURM_STEP
        | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}
        | {"PMI_RANK": "1", "PMI_SIZE": "2"}
        | OPENMPI,
        World(3, 4, 1, 2, "openmpi"),
    ),
    "srun --mpi=pmi2": (SLURM_STEP | {"PMI_RANK": "3", "PMI_SIZE": "4"}, World(3, 4, None, None, "mpich")),
    "torchrun inside a Slurm step": (
        SLURM_STEP | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"} | TORCHRUN,
        World(5, 8, 1, 4, "torchrun"),
    ),
    "torch variables inside a Slurm step": (SLURM_STEP | TORCH_ENV, World(5, 8, 1, 4, "torch-env")),
    "torchrun started by mpirun": (
        OPENMPI | {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"} | TORCHRUN,
        World(5, 8, 1, 4, "torchrun"),
    ),
    "torch variables copied from Open MPI's agree": (
        OPENMPI | {"RANK": "3", "WORLD_SIZE": "4"},
        World(3, 4, 1, 2, "openmpi"),
    ),
    "slots are not processes": (
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_UNIVERSE_SIZE": "64"},
        World(0, 2, None, None, "openmpi"),
    ),
    "PMIx tells no size, and is asked through the library": ({"PMIX_RANK": "3"}, ALONE),
    "PMIx beside the variables that count": (OPENMPI | {"PMIX_RANK": "3"}, World(3, 4, 1, 2, "openmpi")),
    "Flux sets PMI variables too": (
        {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1", "PMI_RANK": "3", "PMI_SIZE": "4"},
        World(3, 4, None, None, "mpich"),
    ),
    "a nested Flux instance is no task": ({"FLUX_URI": "local:///x", "FLUX_JOB_NNODES": "2"}, ALONE),
    "jsrun starts Spectrum MPI": (
        {"JSM_NAMESPACE_RANK": "3", "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_LOCAL_RANK": "1"} | OPENMPI,
        World(3, 4, 1, 2, "openmpi"),
    ),
    "MVAPICH2 is started by Hydra": (
        {"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4", "PMI_RANK": "3", "PMI_SIZE": "4"},
        World(3, 4, None, None, "mvapich2"),
    ),
    "PALS leaves its size to PMI": (
        {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"}
        | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"},
        World(3, 4, 1, 2, "mpich"),
    ),
    "elastic horovodrun": (HOROVODRUN | {"HOROVOD_ELASTIC": "1"}, World(3, 4, 1, 2, "horovodrun")),
    "only the local rank is corrected": (OPENMPI | {"HVDPLUS_LOCAL_RANK": "0"}, World(3, 4, 0, 2, "openmpi")),
    "a launcher that took both hosts for one": (OPENMPI | {"HVDPLUS_LOCAL_RANK": "3"}, World(3, 4, 3, None, "openmpi")),
    "local rank and size are corrected": (
        OPENMPI | {"HVDPLUS_LOCAL_RANK": "3", "HVDPLUS_LOCAL_SIZE": "4"},
        World(3, 4, 3, 4, "openmpi"),
    ),
    "local rank and size where the launcher tells none": (
        {"PMI_RANK": "3", "PMI_SIZE": "4", "HVDPLUS_LOCAL_RANK": "1"},
        World(3, 4, 1, None, "mpich"),
    ),
    "slots alone are nothing": ({"OMPI_UNIVERSE_SIZE": "64"}, ALONE),
    "an empty value is not set": ({"RANK": "", "WORLD_SIZE": "", "OMPI_COMM_WORLD_RANK": ""}, ALONE),
    "a size without a rank is nothing": ({"WORLD_SIZE": "8", "OMPI_COMM_WORLD_SIZE": "4", "PMI_SIZE": "3"}, ALONE),
    "RANK alone may be anybody's": ({"RANK": "3"}, ALONE),
    "families are not mixed": ({"RANK": "3", "PMI_SIZE": "4"}, ALONE),
    "one rank knows its local rank": ({"PMI_RANK": "0", "PMI_SIZE": "1"}, World(0, 1, 0, 1, "mpich")),
}


@pytest.mark.parametrize(("environ", "world"), PITFALLS.values(), ids=PITFALLS)
def test_pitfall(environ, world):
    assert discover(environ) == world


def test_a_job_stays_whole_where_one_node_of_many_tells():
    worlds = [discover({"SLURM_PROCID": str(i), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}) for i in range(3)]
    assert [(w.rank, w.size) for w in worlds] == [(0, 3), (1, 3), (2, 3)]


REFUSED = {
    "no number": (OPENMPI | {"OMPI_COMM_WORLD_SIZE": "four"}, ["OMPI_COMM_WORLD_SIZE='four'", "whole number"]),
    "negative": (HOROVODRUN | {"HOROVOD_RANK": "-1"}, ["HOROVOD_RANK='-1'"]),
    "fraction": (TORCH_ENV | {"WORLD_SIZE": "8.0"}, ["WORLD_SIZE='8.0'"]),
    "other digits": (TORCH_ENV | {"WORLD_SIZE": "٣"}, ["WORLD_SIZE='٣'"]),
    "local rank is no number": (OPENMPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "x"}, ["OMPI_COMM_WORLD_LOCAL_RANK='x'"]),
    "rank is the size": (
        OPENMPI | {"OMPI_COMM_WORLD_RANK": "4"},
        ["OMPI_COMM_WORLD_RANK=4", "OMPI_COMM_WORLD_SIZE=4", "HVDPLUS_RANK"],
    ),
    "size 0": (TORCH_ENV | {"RANK": "0", "WORLD_SIZE": "0"}, ["WORLD_SIZE=0"]),
    "local rank is the local size": (OPENMPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, ["local rank 2 of local size 2"]),
    "local rank beyond the node's tasks": (
        SLURM_STEP | {"SLURM_LOCALID": "2"},
        ["local rank 2 of local size 2", "SLURM_STEP_TASKS_PER_NODE"],
    ),
    "tasks a node": (SLURM_STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(3)"}, ["SLURM_STEP_TASKS_PER_NODE='2(3)'"]),
    "Open MPI and torch variables": (
        OPENMPI
        | {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
        | TORCH_ENV,
        ["OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2", "RANK=5 WORLD_SIZE=8", "HVDPLUS_RANK and HVDPLUS_SIZE"],
    ),
    "a rank of horovodrun that called mpirun": (
        HOROVODRUN | OPENMPI | {"OMPI_COMM_WORLD_RANK": "0"},
        ["HOROVOD_RANK=3 HOROVOD_SIZE=4", "OMPI_COMM_WORLD_RANK=0"],
    ),
    "MPICH's rank alone": ({"PMI_RANK": "3"}, ["PMI_RANK=3", "PMI_SIZE"]),
    "jsrun's size is 0": ({"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "0"}, ["JSM_NAMESPACE_SIZE=0"]),
    "Flux's rank is no number": ({"FLUX_TASK_RANK": "a", "FLUX_JOB_SIZE": "4"}, ["FLUX_TASK_RANK='a'"]),
    "MVAPICH2 and jsrun": (
        {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2", "JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "4"},
        ["MV2_COMM_WORLD_RANK=0 MV2_COMM_WORLD_SIZE=2", "JSM_NAMESPACE_RANK=0 JSM_NAMESPACE_SIZE=4"],
    ),
    "Hydra inside a rank of Open MPI": (
        OPENMPI | {"PMI_RANK": "0", "PMI_SIZE": "2"},
        ["OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 (openmpi)", "PMI_RANK=0 PMI_SIZE=2 (mpich)"],
    ),
    "override's local rank is no number": (OPENMPI | {"HVDPLUS_LOCAL_RANK": "-1"}, ["HVDPLUS_LOCAL_RANK='-1'"]),
    "override's local rank is the size": (OPENMPI | {"HVDPLUS_LOCAL_RANK": "4"}, ["HVDPLUS_LOCAL_RANK=4", "4 ranks"]),
    "override's local size exceeds the size": (
        OPENMPI | {"HVDPLUS_LOCAL_RANK": "0", "HVDPLUS_LOCAL_SIZE": "5"},
        ["HVDPLUS_LOCAL_SIZE=5", "4 ranks"],
    ),
    "override's local size alone": (OPENMPI | {"HVDPLUS_LOCAL_SIZE": "2"}, ["HVDPLUS_LOCAL_SIZE=2 needs"]),
    "Open MPI's rank alone": ({"OMPI_COMM_WORLD_RANK": "3"}, ["OMPI_COMM_WORLD_RANK=3", "OMPI_COMM_WORLD_SIZE"]),
    "PALS without a size": ({"PALS_RANKID": "0", "PALS_LOCAL_SIZE": "2"}, ["PALS_RANKID=0", "PALS_SIZE"]),
    "a step without its size": ({"SLURM_PROCID": "1", "SLURM_STEP_ID": "0"}, ["SLURM_STEP_NUM_TASKS"]),
    "half a torchrun": ({"RANK": "1", "TORCHELASTIC_RUN_ID": "x"}, ["RANK=1", "WORLD_SIZE"]),
    "half an override": (OPENMPI | {"HVDPLUS_RANK": "1"}, ["HVDPLUS_RANK=1 needs HVDPLUS_SIZE"]),
    "the other half": ({"HVDPLUS_SIZE": "2"}, ["HVDPLUS_SIZE=2 needs HVDPLUS_RANK"]),
    "override out of range": ({"HVDPLUS_RANK": "2", "HVDPLUS_SIZE": "2"}, ["HVDPLUS_RANK=2 and HVDPLUS_SIZE=2"]),
}


@pytest.mark.parametrize(("environ", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(environ, words):
    with pytest.raises(LaunchError) as caught:
        discover(environ)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("text", "counts"),
    [("1", [1]), ("2(x3)", [2, 2, 2]), ("2(x3),1", [2, 2, 2, 1]), ("4,4,2", [4, 4, 2]), (" 4 , 2(x1) ", [4, 2])],
)
def test_tasks_per_node(text, counts):
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "2,", "x", "2(x)", "(x2)", "2(x3)1", "-1"])
def test_tasks_per_node_refuses(text):
    with pytest.raises(LaunchError, match="SLURM_STEP_TASKS_PER_NODE"):
        tasks_per_node(text)


PALS = {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"}


@pytest.mark.parametrize(
    "lines", [["n1", "n2", "n3"], ["n1", "n1", "n2", "n2", "n3", "n3", ""]], ids=["a line a node", "a line a slot"]
)
def test_pals_without_a_size_counts_the_nodes(tmp_path, lines):
    nodes = tmp_path / "nodes"
    nodes.write_text("\n".join(lines) + "\n")
    assert discover(PALS | {"PBS_NODEFILE": str(nodes)}) == World(3, 6, 1, 2, "pals")
    with pytest.raises(LaunchError, match=r"PALS_RANKID=6 and PBS_NODEFILE x PALS_LOCAL_SIZE=6 contradict"):
        discover(PALS | {"PALS_RANKID": "6", "PBS_NODEFILE": str(nodes)})
    with pytest.raises(LaunchError, match="PALS_LOCAL_SIZE='x' is not a whole number"):
        discover(PALS | {"PALS_LOCAL_SIZE": "x", "PBS_NODEFILE": str(nodes)})


def test_pals_without_a_size_or_a_node_file_is_refused(tmp_path):
    with pytest.raises(LaunchError, match="PALS_RANKID=3 says that a launcher"):
        discover(PALS | {"PBS_NODEFILE": str(tmp_path / "none")})


@pytest.mark.parametrize("environ", [{}, SLURM_BATCH, {"PMIX_RANK": "0"}, {"RANK": "1"}])
def test_a_launcher_can_be_required(environ):
    with pytest.raises(LaunchError, match=r"no launcher started this process .* require_launcher=True"):
        discover(environ, require_launcher=True)


@pytest.mark.parametrize("environ", [OPENMPI, SLURM_STEP, {"PMI_RANK": "0", "PMI_SIZE": "1"}])
def test_a_launcher_that_is_there_satisfies(environ):
    assert discover(environ, require_launcher=True) == discover(environ)


KEPT = {
    "PATH": "/bin",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_MCA_btl": "tcp,self",
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "PMIX_MCA_gds": "hash",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "HOROVOD_CYCLE_TIME": "2",
    "HVDPLUS_STRATEGY": "fp16",
    "MASTER_ADDR": "n1",
    "FLUX_URI": "local:///x",
}


@pytest.mark.parametrize(("environ", "world"), LAUNCHERS.values(), ids=LAUNCHERS)
def test_a_child_with_a_clean_environment_is_no_rank(environ, world):
    assert discover(clean_env(environ)) == ALONE


def test_a_clean_environment_keeps_what_users_set():
    inner = {
        "OMPI_MCA_orte_hnp_uri": "1.0;tcp://n1:1",
        "OMPI_MCA_ess_base_jobid": "1",
        "PMIX_SERVER_URI2": "x",
        "PMIX_RANK": "3",
        "PMI_FD": "7",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "n1",
        "TORCHELASTIC_RUN_ID": "x",
    }
    assert clean_env(OPENMPI | SLURM_STEP | HOROVODRUN | TORCHRUN | inner | KEPT) == KEPT | {"SLURM_NTASKS": "4"}


@pytest.mark.parametrize(("environ", "world"), LAUNCHERS.values(), ids=LAUNCHERS)
def test_a_launchers_variables_can_be_named(environ, world):
    assert all(name in environ for name in variables(world.launcher))
    assert len(variables(world.launcher)) == (0 if world.launcher == "none" else 2)


HOSTS = {
    "one host after the other": (["a", "a", "a", "b"], [0, 1, 2, 0], [3, 3, 3, 1], [(0, 2), (0, 1), (0, 1), (1, 2)]),
    "round robin": (["a", "b", "a", "b"], [0, 0, 1, 1], [2, 2, 2, 2], [(0, 2), (1, 2), (0, 2), (1, 2)]),
    "uneven round robin": (
        ["a", "b", "a", "b", "b"],
        [0, 0, 1, 1, 2],
        [2, 3, 2, 3, 3],
        [(0, 2), (1, 2), (0, 2), (1, 2), (0, 1)],
    ),
    "a host each": (["a", "b", "c"], [0, 0, 0], [1, 1, 1], [(0, 3), (1, 3), (2, 3)]),
    "one rank": (["a"], [0], [1], [(0, 1)]),
    "nobody": ([], [], [], []),
}


@pytest.mark.parametrize(("hosts", "local", "sizes", "cross"), HOSTS.values(), ids=HOSTS)
def test_places_by_host_names(hosts, local, sizes, cross):
    expected = [Place(*place, *across) for *place, across in zip(local, sizes, cross, strict=True)]
    assert places(hosts) == expected


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 9)), min_size=1))
def test_tasks_per_node_expands_what_slurm_writes(runs):
    text = ",".join(f"{count}(x{times})" if times > 1 else f"{count}" for count, times in runs)
    assert tasks_per_node(text) == [count for count, times in runs for _ in range(times)]


NAMES = sorted({name for environ, _ in [*LAUNCHERS.values(), *PITFALLS.values()] for name in environ} | {"PMIX_RANK"})


@given(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["", "0", "1", "2", "7", "x", "2(x2)"])))
def test_any_environment_gives_a_possible_world_or_a_launch_error(environ):
    try:
        world = discover(environ)
    except LaunchError:
        return
    assert 0 <= world.rank < world.size
    assert world.local_rank is None or world.local_size is None or world.local_rank < world.local_size
    assert (world.launcher != "none") or world == ALONE


def test_the_environment_of_this_process_is_the_default(monkeypatch):
    monkeypatch.setenv("HVDPLUS_RANK", "1")
    monkeypatch.setenv("HVDPLUS_SIZE", "2")
    assert discover() == World(1, 2, None, None, "override")


def test_mpi_launchers_are_those_that_an_mpi_library_can_join():
    launchers = {world.launcher for _, world in LAUNCHERS.values()}
    assert launchers - MPI_LAUNCHERS == {"horovodrun", "torchrun", "torch-env", "override", "none"}
