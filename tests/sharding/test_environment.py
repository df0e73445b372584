"""Environment variables -> rank, local rank, world, address, port; and the meeting of processes that may not all come."""

import os
import subprocess
import sys

import pytest

from mmkit.config import ConfigError
from mmkit.sharding.environment import expand_hosts, free_port, process_environment, started_by, started_here

SLURM = {
    "SLURM_PROCID": "17", "SLURM_NTASKS": "32", "SLURM_STEP_NUM_TASKS": "32", "SLURM_JOB_NODELIST": "gpu[03-05,11]", "SLURM_JOB_ID": "4711",
}  # fmt: skip
TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def place(env):
    found = process_environment(env)
    return found.rank, found.local_rank, found.world, found.address


def test_slurm_gives_the_first_host_and_the_rank_on_the_node():
    assert place(SLURM) == (17, 1, 32, "gpu03")
    assert place(SLURM | {"SLURM_LOCALID": "5"})[1] == 5


def test_slurm_port_differs_between_jobs_and_is_the_same_on_every_node():
    ports = {process_environment(SLURM | {"SLURM_JOB_ID": str(job), "SLURM_PROCID": rank}).port for job in (1, 2) for rank in ("0", "31")}
    assert len(ports) == 2 and all(1024 < port < 65536 for port in ports)
    assert process_environment(SLURM | {"MASTER_PORT": "1234", "MASTER_ADDR": "head"}).port == 1234


def test_torchrun_wins_over_slurm():
    assert place(SLURM | TORCHRUN) == (1, 1, 2, "10.0.0.1")


def test_tpu_pod_hosts_are_processes():
    assert place({"TPU_WORKER_ID": "2", "TPU_WORKER_HOSTNAMES": "a,b,c,d"}) == (2, 0, 4, "a")
    assert place({"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}) == (0, 0, 1, "127.0.0.1")


MET = {"MASTER_ADDR": "head", "MASTER_PORT": "29500"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
MVAPICH = {name.replace("OMPI", "MV2"): value for name, value in OPEN_MPI.items()}
HYDRA = {"PMI_RANK": "5", "MPI_LOCALRANKID": "1", "PMI_SIZE": "8", "MPI_LOCALNRANKS": "4"}


@pytest.mark.parametrize(("env", "launcher"), [(OPEN_MPI, "Open MPI"), (MVAPICH, "MVAPICH"), (HYDRA, "Hydra")])
def test_an_mpi_launcher_is_a_place_once_it_has_an_address(env, launcher):
    assert place(env | MET) == (5, 1, 8, "head") and started_by(env) == (launcher, 8) and started_here(env) == 4
    assert process_environment(env | MET).source == launcher
    with pytest.raises(ConfigError, match=r"not MASTER_ADDR, MASTER_PORT; start with .*torchrun or with srun; unset \w+_SIZE for one") as error:
        process_environment(env)
    assert "\n" not in str(error.value)
    for name in list(env)[:3]:
        left = {key: value for key, value in env.items() if key != name} | MET
        with pytest.raises(ConfigError, match=f"but not {name};"):
            process_environment(left)
    alone = {name: "0" if "RANK" in name and not name.endswith("NRANKS") else "1" for name in env}
    assert place(alone)[:3] == (0, 0, 1) and started_by(alone) == ("", 1)  # mpirun -n 1
    assert place(env | MET | TORCHRUN)[2] == 2


def test_an_mpi_inside_a_slurm_job_is_told_from_a_step_that_speaks_its_protocol():
    step = SLURM | {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8"}
    assert started_by(step | HYDRA) == ("SLURM", 8) and place(step | HYDRA)[3] == "gpu03"  # srun --mpi=pmi2
    daemons = SLURM | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}  # which srun started for mpirun, one a host
    assert started_by(daemons | OPEN_MPI) == ("Open MPI", 8) and place(daemons | HYDRA | MET) == (5, 1, 8, "head")


def test_nothing_set_is_one_process_with_a_free_port():
    alone = process_environment({})
    assert (alone.rank, alone.world, alone.address) == (0, 1, "127.0.0.1") and 0 < alone.port < 65536
    assert place({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) == (0, 0, 1, "127.0.0.1")


def test_a_batch_script_waits_for_no_tasks_and_a_step_counts_its_own():
    assert place({**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": ""}) == (0, 0, 1, "127.0.0.1")
    assert place({**SLURM, "SLURM_STEP_NUM_TASKS": "1"})[2] == 1, "srun -n1 --pty in an allocation of 32"
    assert place({**SLURM, "SLURM_NTASKS": "64"})[2] == 32


@pytest.mark.parametrize(
    ("env", "missing"),
    [
        ({"RANK": "1"}, ["LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]),
        ({k: v for k, v in TORCHRUN.items() if k != "MASTER_PORT"}, ["MASTER_PORT"]),
        ({k: v for k, v in SLURM.items() if k != "SLURM_JOB_NODELIST"}, ["SLURM_JOB_NODELIST"]),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, ["TPU_WORKER_ID"]),
    ],
)
def test_half_set_variables_are_refused_by_name(env, missing):
    with pytest.raises(ConfigError) as error:
        process_environment(env)
    assert all(name in str(error.value).split("but not")[1] for name in missing)


def test_an_empty_variable_counts_as_unset():
    assert place({"RANK": "", "WORLD_SIZE": " ", "SLURM_PROCID": ""}) == (0, 0, 1, "127.0.0.1")
    assert place(SLURM | {"RANK": "", "MASTER_ADDR": "", "SLURM_LOCALID": ""}) == (17, 1, 32, "gpu03")
    with pytest.raises(ConfigError, match="environment has LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT but not RANK;"):
        process_environment(TORCHRUN | {"RANK": ""})


def test_wrong_values_are_named():
    with pytest.raises(ConfigError, match="RANK='one' is not a whole number"):
        process_environment(TORCHRUN | {"RANK": "one"})
    with pytest.raises(ConfigError, match="rank 2 from torchrun is not below the 2 processes"):
        process_environment(TORCHRUN | {"RANK": "2"})


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu[03-05,11]", ["gpu03", "gpu04", "gpu05", "gpu11"]),
        ("login1,gpu[9-10]-ib,z", ["login1", "gpu9-ib", "gpu10-ib", "z"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("one", ["one"]),
    ],
)
def test_slurm_node_lists_are_written_out(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(("text", "wrong"), [("gpu[a-b]", "'a-b'"), ("gpu[1-]", "'1-'"), ("gpu[3-1],x", "'3-1'"), ("gpu[1-2", "'gpu[1-2'")])
def test_a_malformed_node_list_is_named(text, wrong):
    with pytest.raises(ConfigError) as error:
        process_environment(SLURM | {"SLURM_JOB_NODELIST": text})
    assert f"SLURM_JOB_NODELIST={text!r}: {wrong}" in str(error.value)


CONNECT = """
import torch.distributed as dist
from mmkit.sharding.environment import init_distributed
try:
    place = init_distributed(timeout={timeout})
    print("PLACE", place.rank, place.world, dist.get_world_size(), place.source)
except Exception as error:
    print(type(error).__name__, error)
"""


def start(env, timeout=20):
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "MASTER", "RANK", "WORLD", "LOCAL_RANK"))}
    return subprocess.Popen([sys.executable, "-c", CONNECT.format(timeout=timeout)], env=kept | env, text=True, stdout=subprocess.PIPE)


def test_a_kernel_without_any_variable_becomes_one_process():
    assert "PLACE 0 1 1 one process\n" in start({}).communicate(timeout=60)[0]


def test_processes_that_do_not_come_are_named():
    env = TORCHRUN | {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    children = [start(env | {"RANK": str(rank), "LOCAL_RANK": "0"}, timeout=5) for rank in (0, 2)]
    for child in children:
        assert "ranks [1, 3] of 4 have not come" in child.communicate(timeout=60)[0]


def test_a_taken_port_is_named():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        env = TORCHRUN | {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        assert f"127.0.0.1:{port} is taken; set MASTER_PORT" in start(env, timeout=5).communicate(timeout=60)[0]
