"""What torchrun, srun, and neither of them say of a process."""

import pytest

import shardlab
from shardlab.cluster.environment import Job, find_job, without_job
from shardlab.cluster.room import check_parallel, with_ranks
from shardlab.errors import ShardlabError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "0",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def test_torchrun_says_where_a_process_stands() -> None:
    assert find_job(TORCHRUN) == Job(3, 4, 1, 2, "node0", 29500, True, "run/0/node0:29500/4")


def test_srun_says_it_too_and_keeps_no_store() -> None:
    assert find_job(SRUN) == Job(1, 2, 0, None, "node0", 29500, False, "slurm/17/0//node0:29500/2")


ALONE = [
    {},
    {"RANK": "", "WORLD_SIZE": ""},
    {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"},
    {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"},  # the script of sbatch itself
    {**SRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},  # an interactive shell
]


@pytest.mark.parametrize("environment", ALONE)
def test_other_processes_stand_alone(environment: dict[str, str]) -> None:
    assert find_job(environment) is None


def without(given: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in given.items() if name not in names}


WRONG = [
    # environment                                  what the line names
    (without(TORCHRUN, "RANK"), "WORLD_SIZE is set, .* but RANK is not"),
    (without(TORCHRUN, "WORLD_SIZE"), "RANK is set, .* but WORLD_SIZE is not"),
    (without(TORCHRUN, "MASTER_ADDR"), "WORLD_SIZE=4 is set, .* but MASTER_ADDR is not"),
    (without(SRUN, "MASTER_ADDR", "MASTER_PORT"), "SLURM_NTASKS=2 is set, .* MASTER_ADDR and MASTER_PORT are not"),
    ({**TORCHRUN, "RANK": "4"}, "RANK=4 in the environment: it must be 0 to 3"),
    ({**TORCHRUN, "RANK": "-1"}, "RANK=-1 .* 0 to 3"),
    ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE=0 .* a number from 1 on"),
    ({**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE=two"),
    ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT=70000 .* 1 to 65535"),
]


@pytest.mark.parametrize(("environment", "line"), WRONG)
def test_what_is_missing_or_impossible_is_named(environment: dict[str, str], line: str) -> None:
    with pytest.raises(ShardlabError, match=line) as raised:
        find_job(environment)
    assert "\n" not in str(raised.value)


def test_a_restart_and_another_step_are_other_jobs() -> None:
    for given, changed in (
        (TORCHRUN, {"TORCHELASTIC_RESTART_COUNT": "1"}),
        (TORCHRUN, {"TORCHELASTIC_RUN_ID": "other"}),
        (SRUN, {"SLURM_STEP_ID": "1"}),
        (SRUN, {"SLURM_RESTART_COUNT": "1"}),
    ):
        one, other = find_job(given), find_job({**given, **changed})
        assert one is not None
        assert other is not None
        assert one.token != other.token


def test_a_rank_does_not_see_what_describes_its_launcher() -> None:
    """torch would take torchrun's store for the ranks' own."""
    assert without_job({**TORCHRUN, "HOME": "/home/me", "OMP_NUM_THREADS": "1"}) == {
        "HOME": "/home/me",
        "OMP_NUM_THREADS": "1",
    }


def test_ranks_follow_the_number_of_processes_unless_given() -> None:
    assert with_ranks(["strategy=ddp"], 4) == ["strategy=ddp", "ranks=4"]
    assert with_ranks(["ranks=2"], 4) == ["ranks=2"]
    assert with_ranks(["++ranks=2"], 4) == ["++ranks=2"]


def test_a_sweep_in_a_job_runs_one_after_the_other() -> None:
    check_parallel(1, 2)
    with pytest.raises(ShardlabError, match=r"sweep\.parallel=1 would do"):
        check_parallel(2, 2)


def test_train_from_python_is_refused_in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ShardlabError, match="can't join a job of 4 processes"):
        shardlab.train(["strategy=ddp"])
