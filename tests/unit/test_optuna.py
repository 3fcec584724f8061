"""The Optuna sweeper with launchers that stand in for shardlab's: no run is started, a job is a function."""

import math
import statistics
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext
from omegaconf import OmegaConf

from shardlab.config.compose import composing
from shardlab.config.overrides import check_overrides
from shardlab.errors import ShardlabError
from shardlab.launch.signals import Stopped
from shardlab.sweeps import trials
from shardlab.sweeps.rows import Row, Rows

optuna = pytest.importorskip("optuna")

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution  # noqa: E402
from optuna.trial import TrialState  # noqa: E402

from hydra_plugins.shardlab_optuna import _pictures, _study, _sweep  # noqa: E402
from hydra_plugins.shardlab_optuna._space import space_of  # noqa: E402

COMPLETE, PRUNED, FAIL, RUNNING = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL, TrialState.RUNNING
WAIT = 60
LR = "optimizer.lr=interval(0,1)"

Work = Callable[[dict[str, Any], int], Any]
"""A job: its values by key, and its number, to its objective."""


def values_of(overrides: Sequence[str]) -> dict[str, Any]:
    return {one.key_or_group: one.value() for one in OverridesParser.create().parse_overrides(list(overrides))}


def returned(value: Any, status: JobStatus = JobStatus.COMPLETED) -> JobReturn:
    job = JobReturn(status=status)
    job.return_value = value
    return job


class Slots:
    """As shardlab's launcher: `parallel` jobs at once, each in a thread."""

    def __init__(self, work: Work, parallel: int = 1) -> None:
        self.work, self.parallel = work, parallel
        self.pool = ThreadPoolExecutor(parallel)
        self.submitted: list[tuple[int, list[str]]] = []
        self.futures: list[Future[Any]] = []
        self.most = 0

    def submit(self, overrides: Sequence[str], number: int) -> JobReturn:
        self.submitted.append((number, list(overrides)))
        self.futures.append(self.pool.submit(self.work, values_of(overrides), number))
        self.most = max(self.most, sum(not future.done() for future in self.futures))
        return returned(self.futures[-1])

    def check(self) -> None:
        pass

    @property
    def numbers(self) -> list[int]:
        return [number for number, _ in self.submitted]


class Batches:
    """As Hydra's other launchers: a batch of jobs, and back when all have ended."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.batches: list[list[int]] = []

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        self.batches.append(list(range(initial_job_idx, initial_job_idx + len(job_overrides))))
        jobs = []
        for number, overrides in zip(self.batches[-1], job_overrides, strict=True):
            try:
                jobs.append(returned(self.work(values_of(overrides), number)))
            except Exception as error:
                jobs.append(returned(error, JobStatus.FAILED))
        return jobs


def run(launcher: Any, *words: str, folder: str = "search") -> None:
    """What `shardlab train -m hydra/sweeper=shardlab_optuna WORDS` does once Hydra has called the sweeper."""
    with composing(["hydra/sweeper=shardlab_optuna", f"hydra.sweep.dir='{folder}'", *words], sweep=True) as cfg:
        sweeper: Any = Plugins.instance()._instantiate(cfg.hydra.sweeper)
        sweeper.config, sweeper.launcher = cfg, launcher
        sweeper.hydra_context = HydraContext(
            config_loader=GlobalHydra.instance().config_loader(), callbacks=Callbacks()
        )
        sweeper.sweep(list(cfg.hydra.overrides.task))


def search(launcher: Any, *words: str, folder: str = "search") -> optuna.Study:
    """The study that `run` leaves."""
    run(launcher, *words, folder=folder)
    return study_in(folder)


kept: dict[str, Any] = {}
"""Folder -> its study's storage, of a test that keeps no file."""


def study_in(folder: str) -> optuna.Study:
    return optuna.load_study(study_name=None, storage=kept.get(folder, f"sqlite:///{folder}/study.db"))


def states(study: optuna.Study) -> list[TrialState]:
    return [trial.state for trial in study.get_trials(deepcopy=False)]


def params(study: optuna.Study) -> list[dict[str, Any]]:
    return [trial.params for trial in study.get_trials(deepcopy=False)]


def lr(values: dict[str, Any], number: int) -> float:
    return float(values["optimizer.lr"])


@pytest.fixture
def disk() -> None:
    """For a test of what stands in study.db, or is asked in other threads: no storage in memory."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Making a database and drawing take longer than all the rest: only the tests of either do."""

    class InMemory(optuna.storages.InMemoryStorage):
        def __new__(cls, url: str, engine_kwargs: object = None) -> Any:
            return kept.setdefault(folders[-1], optuna.storages.InMemoryStorage())

    kept.clear()
    folders: list[str] = []
    opened = _sweep.open_study
    monkeypatch.setattr(
        _sweep, "open_study", lambda keys, folder, *rest: folders.append(str(folder)) or opened(keys, folder, *rest)
    )
    if "disk" not in request.fixturenames:
        monkeypatch.setattr(_study, "RDBStorage", InMemory)
    if "pictures" not in request.node.name:
        monkeypatch.setattr(_sweep, "draw", lambda *_: None)


# What is searched

SPACES = [
    # right side                           distribution                                  the values that it holds
    ("interval(1e-5,1e-1)",                FloatDistribution(1e-5, 1e-1),                None),
    ("interval(1,3)",                      FloatDistribution(1, 3),                      None),
    ("tag(log,interval(1e-5,1e-1))",       FloatDistribution(1e-5, 1e-1, log=True),      None),
    ("int(interval(1,4))",                 IntDistribution(1, 4),                        [1, 2, 3, 4]),
    ("tag(log,int(interval(1,100)))",      IntDistribution(1, 100, log=True),            None),
    ("int(tag(log,interval(1,100)))",      IntDistribution(1, 100, log=True),            None),
    ("range(1,10,2)",                      IntDistribution(1, 9, step=2),                [1, 3, 5, 7, 9]),
    ("range(1,9,2)",                       IntDistribution(1, 7, step=2),                [1, 3, 5, 7]),
    ("range(3)",                           IntDistribution(0, 2),                        [0, 1, 2]),
    ("range(10,1,-3)",                     IntDistribution(4, 10, step=3),               [4, 7, 10]),
    ("shuffle(range(1,4))",                IntDistribution(1, 3),                        [1, 2, 3]),
    ("range(0.1,0.5,0.1)",                 FloatDistribution(0.1, 0.4, step=0.1),        [0.1, 0.2, 0.3, 0.4]),
    ("a,b",                                CategoricalDistribution(["a", "b"]),          None),
    ("choice(b,a,b)",                      CategoricalDistribution(["b", "a"]),          None),
    ("shuffle(a,b,c)",                     CategoricalDistribution(["a", "b", "c"]),     None),
    ("0.5,null,true,[1,2],'x y',{k:1}",
     CategoricalDistribution(["0.5", "null", "True", "[1,2]", "'x y'", "{k:1}"]),                                None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "distribution", "holds"), SPACES, ids=[space[0] for space in SPACES])
def test_a_space_is_what_hydra_means_by_it(text, distribution, holds):
    parsed = check_overrides([f"key={text}", "other=1"], sweep=True)
    space = space_of(parsed)
    assert space.distributions == {"key": distribution}
    if holds is not None:
        if parsed[0].is_discrete_sweep():
            assert sorted(round(value, 12) for value in parsed[0].sweep_iterator()) == holds
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
        proposed = [space.values(study.ask(space.distributions).params)["key"] for _ in range(60)]
        assert sorted(set(proposed)) == holds  # 0.30000000000000004 is not 0.3


def test_a_range_is_counted_in_decimals():
    """As binary numbers 1.1 is a little more than 11 times 0.1, and Hydra's own range holds 1.1 as well."""
    space = space_of(check_overrides(["key=range(0,1.1,0.1)"], sweep=True))
    assert space.distributions["key"] == FloatDistribution(0, 1.0, step=0.1)
    assert space.keys["key"].value(0.1 + 0.1 + 0.1) == 0.3


def test_a_job_is_the_fixed_words_and_the_values_with_all_their_digits():
    words = ["a.b=interval(0,1)", "model=tiny", "+c=x,'y z'", "d='p, q'", "e=range(1,9)", "model=small"]
    space = space_of(check_overrides(words, sweep=True))
    third = 1 / 3 * 1e-5
    overrides = space.overrides(space.values({"a.b": third, "c": "'y z'", "e": 4}))
    assert overrides == ["model=small", "d='p, q'", f"a.b={third!r}", "+c='y z'", "e=4"]
    assert values_of(overrides) == {"model": "small", "d": "p, q", "a.b": third, "c": "y z", "e": 4}


def test_a_glob_is_the_names_of_the_group():
    seen = []
    search(Slots(lambda values, number: seen.append(values["optimizer"]) or 1.0), "optimizer=glob(adam*)")
    assert set(seen) == {"adam", "adamw"}


REFUSED = [
    # words                                                          says
    ([],                                                             "nothing to search"),
    (["seed=3"],                                                     "nothing to search"),
    (["optimizer.lr=interval(1,0)"],                                 "from a lower number to a higher"),
    (["optimizer.lr=interval(0,inf)"],                               "from a lower number to a higher"),
    (["optimizer.lr=tag(log,interval(0,1))"],                        "begins above 0"),
    (["optimizer.lr=tag(lgo,interval(0,1))"],                        "unknown tag lgo"),
    (["seed=tag(log,range(1,9))"],                                   "log goes with an interval"),
    (["seed=range(3,3)"],                                            "the range holds no value"),
    (["seed=range(3,9,-1)"],                                         "the range holds no value"),
    (["seed=range(3,9,0)"],                                          "a step that isn't 0"),
    (["model=interval(0,1)"],                                        "model is chosen by name"),
    (["strategy=glob(x*)"],                                          "matches no choice of strategy"),
    (["sweep.parallel=1,2"],                                         "give it one value"),
    (["model=tiny,tinny"],                                           "unknown model=tinny; did you mean 'tiny'"),
    (["optimizer.lrr=interval(0,1)"],                                "unknown key 'optimizer.lrr'; did you mean"),
    (["model.n_layers=interval(1,4)"],                               "model.n_layers must be a whole number"),
    ([LR, "sweep.objective=val/los"],                                "did you mean 'val/loss'"),
    ([LR, "sweep.objective=val/f1"],                                 "a language model has none"),
    ([LR, "hydra.sweeper.n_trials=0"],                               "n_trials=0 must be at least 1"),
    ([LR, "hydra.sweeper.seed=-1"],                                  "seed=-1 must be at least 0"),
    ([LR, "hydra.sweeper.sampler=TPE"],                              "sampler=TPE; did you mean 'tpe'"),
    ([LR, "hydra.sweeper.sampler=cmaes"],                            "one of tpe, random, gp"),  # it unpickles
    ([LR, "hydra.sweeper.sampler=nsga"],                             "one of tpe, random, gp"),
    ([LR, "hydra.sweeper.pruner=hyperband"],                         "one of none, median, halving"),
    ([LR, "hydra.sweeper.pruner=median", "sweep.objective=train/loss"], "don't measure train/loss"),
    ([LR, "hydra.sweeper.pruner=median", "sweep.objective=[val/loss,train/loss]"], "by one objective, not 2"),
    ([LR, "hydra.sweeper.storage=here"],                             "in here can't be opened"),
    ([LR, "hydra.sweeper.storage='sqlite:////no/such/folder/x.db'"], "unable to open database file"),
    ([LR, "hydra.sweeper.storage='oracle://me:secret@db/x'"],        "in oracle://db/x can't be opened"),
    ([LR, "hydra.sweeper.study=''"],                                 "hydra.sweeper.study is empty"),
    ([LR, "hydra.sweeper.n_trials=few"],                             "n_trials must be a whole number"),
    ([LR, "hydra.sweeper.trials=3"],                                 "unknown key 'hydra.sweeper.trials'"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "says"), REFUSED, ids=[" ".join(case[0]) or "nothing" for case in REFUSED])
def test_what_cannot_be_is_said_in_one_line_before_a_job(words, says, disk):
    from shardlab.config.complaint import complaint
    from shardlab.config.compose import COMPOSITION_ERRORS

    slots = Slots(lr)
    with pytest.raises((ShardlabError, *COMPOSITION_ERRORS)) as raised:
        search(slots, *words)
    line = complaint(raised.value)
    assert says in line
    assert "\n" not in line
    assert "secret" not in line
    assert not slots.submitted


def test_a_pruner_is_refused_where_no_job_can_be_ended():
    with pytest.raises(ShardlabError, match="needs hydra/launcher=shardlab"):
        search(Batches(lr), LR, "hydra.sweeper.pruner=halving")


def test_without_optuna_only_who_chooses_it_hears_of_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ShardlabError) as raised:
        search(Slots(lr), LR)
    assert str(raised.value) == "hydra/sweeper=shardlab_optuna needs optuna: pip install 'shardlab[optuna]'"


def test_an_optuna_too_old_is_refused(monkeypatch):
    monkeypatch.setattr(optuna, "__version__", "3.6.2")
    with pytest.raises(ShardlabError, match=r"needs optuna 4 or newer, not 3\.6\.2"):
        search(Slots(lr), LR)


# Who proposes


@pytest.mark.parametrize("sampler", ["tpe", "random", "gp"])
def test_a_continued_search_proposes_what_an_unbroken_one_does(sampler, disk):
    words = (LR, "trainer.clip=interval(0.1,1)", f"hydra.sweeper.sampler={sampler}")

    def bowl(values: dict[str, Any], number: int) -> float:
        return float((values["optimizer.lr"] - 0.3) ** 2 + (values["trainer.clip"] - 0.6) ** 2)

    whole = search(Slots(bowl), *words, "hydra.sweeper.n_trials=12", folder="whole")  # from the 11th they learn
    search(Slots(bowl), *words, "hydra.sweeper.n_trials=11", folder="parts")
    slots = Slots(bowl)
    parts = search(slots, *words, "hydra.sweeper.n_trials=12", folder="parts")
    assert params(whole) == params(parts)
    assert len({trial["optimizer.lr"] for trial in params(whole)}) == 12
    assert slots.numbers == [11]


def test_the_seed_is_the_config_s_own_unless_given():
    words = (LR, "hydra.sweeper.n_trials=2")
    seven = params(search(Slots(lr), *words, "seed=7", folder="config"))
    assert params(search(Slots(lr), *words, "hydra.sweeper.seed=7", folder="given")) == seven
    assert params(search(Slots(lr), *words, folder="other")) != seven


def test_tpe_beats_random_on_a_bowl():
    words = [f"optimizer.kwargs.x{axis}=interval(-5,5)" for axis in range(3)]

    def bowl(values: dict[str, Any], number: int) -> float:
        return float(sum((values[f"optimizer.kwargs.x{axis}"] - axis) ** 2 for axis in range(3)))

    median = {}
    for sampler in ("tpe", "random"):
        found = []
        for seed in range(5):
            keys = (f"hydra.sweeper.sampler={sampler}", f"hydra.sweeper.seed={seed}", "hydra.sweeper.n_trials=30")
            found.append(search(Slots(bowl), *words, *keys, folder=f"{sampler}{seed}").best_value)
        median[sampler] = statistics.median(found)
    assert median["tpe"] < 0.5 * median["random"]


# Jobs


def test_a_job_starts_as_soon_as_another_ends():
    """Job 0 ends only once job 3 has begun, which a batch of two would wait for in vain."""
    begun = [threading.Event() for _ in range(5)]

    def work(values: dict[str, Any], number: int) -> float:
        begun[number].set()
        return 1.0 if number != 0 or begun[3].wait(WAIT) else math.nan

    slots = Slots(work, parallel=2)
    study = search(slots, LR, "hydra.sweeper.n_trials=5")
    assert states(study) == [COMPLETE] * 5
    assert slots.most == 2


def test_another_launcher_gets_batches():
    batches = Batches(lr)
    study = search(batches, LR, "hydra.sweeper.n_trials=5", "sweep.parallel=2")
    assert batches.batches == [[0, 1], [2, 3], [4]]
    assert [trial.value for trial in study.get_trials()] == [trial.params["optimizer.lr"] for trial in study.trials]


@pytest.mark.parametrize("nothing", [math.nan, math.inf, None, (1.0, 2.0), "text"], ids=str)
def test_a_job_without_a_value_is_a_failed_trial_and_does_not_count(nothing):
    slots = Slots(lambda values, number: nothing if number in (1, 2) else 1.0)
    study = search(slots, LR, "hydra.sweeper.n_trials=4")
    assert states(study) == [COMPLETE, FAIL, FAIL, COMPLETE]  # four jobs for one command, whatever they come to
    study = search(slots, LR, "hydra.sweeper.n_trials=4")
    assert states(study) == [COMPLETE, FAIL, FAIL, COMPLETE, COMPLETE, COMPLETE]
    assert slots.numbers == [0, 1, 2, 3, 4, 5]


def test_a_job_that_raises_elsewhere_is_a_failed_trial(capsys):
    def work(values: dict[str, Any], number: int) -> float:
        if number == 1:
            raise RuntimeError("broken")
        return 1.0

    assert states(search(Batches(work), LR, "hydra.sweeper.n_trials=3")) == [COMPLETE, FAIL, COMPLETE]
    assert "job 1 failed: RuntimeError: broken" in capsys.readouterr().err


def test_a_job_that_the_launcher_gave_up_is_a_failed_trial():
    slots = Slots(lr)
    cancelled: Future[float] = Future()
    cancelled.cancel()
    cancelled.set_running_or_notify_cancel()
    submit = slots.submit
    slots.submit = lambda overrides, number: returned(cancelled) if number == 1 else submit(overrides, number)  # type: ignore[method-assign]
    assert states(search(slots, LR, "hydra.sweeper.n_trials=3")) == [COMPLETE, FAIL, COMPLETE]


@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit(143), Stopped("another job failed")], ids=repr)
def test_an_interrupted_search_is_gone_on_with(end, disk):
    hold = threading.Event()

    def work(values: dict[str, Any], number: int) -> float:
        if number == 2:
            hold.wait(WAIT)
        return 1.0

    class Interrupted(Slots):
        def submit(self, overrides: Sequence[str], number: int) -> JobReturn:
            if number == 4:
                raise end
            return super().submit(overrides, number)

    words = (LR, "hydra.sweeper.n_trials=6", "hydra.sweeper.pruner=median")
    with pytest.raises(type(end)):
        search(Interrupted(work, parallel=2), *words)
    hold.set()
    assert states(study_in("search")) == [COMPLETE, COMPLETE, FAIL, COMPLETE, FAIL]
    assert trials.prunes == {}
    assert OmegaConf.load("search/optimization_results.yaml").best_job == 0
    slots = Slots(work)
    assert states(search(slots, *words)).count(COMPLETE) == 6
    assert slots.numbers == [5, 6, 7]


def test_a_search_ends_while_its_jobs_do_not(disk):
    """Ctrl-C is noted by the launcher, and must not wait for a job of hours."""
    hold, begun = threading.Event(), threading.Event()

    def work(values: dict[str, Any], number: int) -> float:
        begun.set()
        hold.wait(WAIT)
        return 1.0

    class Noted(Slots):
        def check(self) -> None:
            if begun.is_set():
                raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            search(Noted(work), LR, "hydra.sweeper.n_trials=2")
        assert not hold.is_set()
    finally:
        hold.set()
    assert states(study_in("search")) == [FAIL]


def test_trials_of_a_killed_launcher_are_failed_and_made_up_for(disk):
    words = (LR, "hydra.sweeper.n_trials=3")
    search(Slots(lr), LR, "hydra.sweeper.n_trials=2")
    study_in("search").ask()  # asked, and then the launcher was killed
    assert states(study_in("search")) == [COMPLETE, COMPLETE, RUNNING]
    slots = Slots(lr)
    assert states(search(slots, *words)) == [COMPLETE, COMPLETE, FAIL, COMPLETE]
    assert slots.numbers == [3]


ENDED = [
    # row's status   objective     trial's state   value
    ("finished",     [0.25],       COMPLETE,       0.25),
    ("pruned",       [0.25],       PRUNED,         7.0),
    ("failed",       [0.25],       FAIL,           None),
    ("killed",       [0.25],       FAIL,           None),
    ("running",      [],           FAIL,           None),
]  # fmt: skip


@pytest.mark.parametrize(("status", "objective", "state", "value"), ENDED)
def test_a_trial_of_a_killed_launcher_ended_as_its_job_did(status, objective, state, value, disk):
    """A launcher killed between a job's row and its trial's once lost the job."""
    words = (LR, "hydra.sweeper.n_trials=2")
    search(Slots(lr), LR, "hydra.sweeper.n_trials=1")
    asked = study_in("search").ask()
    asked.report(7.0, 1)
    Rows(Path("search")).write(Row(asked.number, "", "", status, objective=objective))
    slots = Slots(lr)
    trial = search(slots, *words).trials[asked.number]
    assert (trial.state, trial.value) == (state, value)
    assert slots.numbers == ([] if state != FAIL else [2])


def test_an_interrupted_search_keeps_the_jobs_that_finished(disk):
    """Of a batch that was cut off, the trials of its first jobs."""

    def work(values: dict[str, Any], number: int) -> float:
        if number == 2:
            raise KeyboardInterrupt
        Rows(Path("search")).write(Row(number, "", "", "finished", objective=[float(number)]))
        return float(number)

    with pytest.raises(KeyboardInterrupt):
        search(Batches(work), LR, "hydra.sweeper.n_trials=4", "sweep.parallel=4")
    study = study_in("search")
    assert states(study) == [COMPLETE, COMPLETE, FAIL, FAIL]
    assert [trial.value for trial in study.trials] == [0.0, 1.0, None, None]


def test_a_search_that_has_its_trials_runs_none(capsys):
    search(Slots(lr), LR, "hydra.sweeper.n_trials=2")
    Path("search/optimization_results.yaml").unlink()
    slots = Slots(lr)
    search(slots, LR, "hydra.sweeper.n_trials=2")
    assert not slots.submitted
    assert "the study has 2 trials and hydra.sweeper.n_trials=2: nothing to run" in capsys.readouterr().err
    assert Path("search/optimization_results.yaml").exists()


OTHER = [
    # words of the second command                                differ
    ((LR, "seed=2"),                                             "fixed values"),
    ((LR, "sweep.objective=train/loss"),                         "objective"),
    (("optimizer.lr=interval(0,2)",),                            "searched values"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "differ"), OTHER)
def test_another_search_does_not_go_on_with_this_one(words, differ, disk):
    search(Slots(lr), LR, "hydra.sweeper.n_trials=2")
    with pytest.raises(ShardlabError, match=rf"is of another search \(its {differ} differ\)"):
        search(Slots(lr), *words)


def test_how_jobs_are_run_and_shown_may_change_when_a_search_goes_on():
    search(Slots(lr), LR, "hydra.sweeper.n_trials=1")
    changed = ("sweep.parallel=2", "runtime.timeout=9", "tracking=none", "hydra.sweeper.sampler=random")
    assert len(search(Slots(lr), LR, "hydra.sweeper.n_trials=2", *changed).trials) == 2


def test_two_folders_share_a_storage_and_no_study(tmp_path, disk):
    url = f"sqlite:///{tmp_path}/shared.db"
    slots = Slots(lr)
    for folder in ("a", "b", "a"):
        run(slots, LR, f"hydra.sweeper.storage='{url}'", "hydra.sweeper.n_trials=2", folder=folder)
    assert sorted(optuna.get_all_study_names(url)) == [f"{tmp_path.name}/a", f"{tmp_path.name}/b"]
    assert slots.numbers == [0, 1, 0, 1]


def test_a_trial_that_runs_in_another_folder_is_left_alone(tmp_path, disk):
    words = (LR, f"hydra.sweeper.storage='sqlite:///{tmp_path}/shared.db'", "hydra.sweeper.study=ours")
    run(Slots(lr), *words, "hydra.sweeper.n_trials=1", folder="a")
    study = optuna.load_study(study_name="ours", storage=f"sqlite:///{tmp_path}/shared.db")
    study.ask().set_user_attr("folder", str(tmp_path / "b"))
    study.ask().set_user_attr("folder", str(tmp_path / "a"))
    run(Slots(lr), *words, "hydra.sweeper.n_trials=2", folder="a")
    assert states(study) == [COMPLETE, RUNNING, FAIL, COMPLETE]


def test_a_study_of_somebody_else_is_refused(tmp_path, disk):
    url = f"sqlite:///{tmp_path}/theirs.db"
    optuna.create_study(study_name="theirs", storage=url).optimize(lambda trial: trial.suggest_float("x", 0, 1), 1)
    with pytest.raises(ShardlabError, match="is of another search"):
        run(Slots(lr), LR, f"hydra.sweeper.storage='{url}'", "hydra.sweeper.study=theirs")


def test_a_folder_may_have_any_name(disk):
    run(Slots(lr), LR, "hydra.sweeper.n_trials=1", folder="a? {b}% #1")
    assert {path.name for path in Path("a? {b}% #1").iterdir()} == {
        "study.db",
        "multirun.yaml",
        "optimization_results.yaml",
    }


# Pruning


def curve(values: list[float], key: str = "loss") -> Work:
    """A job that is evaluated four times at a level of its own, and ends where it is told to; notes how far it got."""

    def work(_: dict[str, Any], number: int) -> float:
        answer = trials.prunes[number]
        for evaluation in range(1, 5):
            reached[number] = evaluation
            if answer(10 * evaluation, {key: values[number] / evaluation, "other": 0.0}):
                break
        return values[number] / reached[number]

    reached: dict[int, int] = {}
    work.reached = reached  # type: ignore[attr-defined]
    return work


PRUNING = [
    # pruner     objective       levels of the jobs         states                                   evaluations
    ("median",   "val/loss",     [1, 2, 3, 4, 5, 9, 1],     [COMPLETE] * 5 + [PRUNED, COMPLETE],     [4] * 5 + [1, 4]),
    ("median",   "val/accuracy", [5, 4, 3, 2, 6, 1, 9],     [COMPLETE] * 5 + [PRUNED, COMPLETE],     [4] * 5 + [1, 4]),
    ("halving",  "val/loss",     [1, 2, 0.5],               [COMPLETE, PRUNED, COMPLETE],            [4, 1, 4]),
]  # fmt: skip


@pytest.mark.parametrize(("pruner", "objective", "levels", "expected", "evaluations"), PRUNING)
def test_a_hopeless_job_is_ended_and_counts(pruner, objective, levels, expected, evaluations, disk):
    work = curve([float(level) for level in levels], objective.removeprefix("val/"))
    words = [LR, f"hydra.sweeper.pruner={pruner}", f"sweep.objective={objective}", "dataset=nsmc"]
    study = search(Slots(work), *words, f"hydra.sweeper.n_trials={len(levels)}")
    assert states(study) == expected
    assert list(work.reached.values()) == evaluations
    pruned = study.trials[expected.index(PRUNED)]
    assert pruned.value == levels[pruned.number]  # the last that was seen of it
    assert trials.prunes == {}
    slots = Slots(work)
    search(slots, *words, f"hydra.sweeper.n_trials={len(levels)}")
    assert not slots.submitted


def test_without_a_pruner_nobody_is_asked():
    study = search(Slots(lambda values, number: 1.0 if not trials.prunes else math.nan), LR, "hydra.sweeper.n_trials=2")
    assert states(study) == [COMPLETE] * 2


def test_an_answer_after_the_end_changes_nothing(disk):
    """A job's thread outlives an interrupted search, and asks once more."""
    asked = []

    def work(values: dict[str, Any], number: int) -> float:
        asked.append(trials.prunes[number])
        return 1.0

    study = search(Slots(work), LR, "hydra.sweeper.n_trials=1", "hydra.sweeper.pruner=halving")
    assert asked[0](10, {"loss": 1.0}) is False
    assert asked[0](10, {"accuracy": 1.0}) is False
    assert states(study) == [COMPLETE]


# What it leaves


def test_the_best_job_is_told_and_written():
    study = search(Slots(lr), LR, "seed=range(3)", "dataset=pydoc,synthetic", "hydra.sweeper.n_trials=5")
    number = study.best_trial.number
    rate = study.best_params["optimizer.lr"]
    written = OmegaConf.load("search/optimization_results.yaml")
    assert written.best_job == number
    assert written.best_params["optimizer.lr"] == rate
    assert written.best_value == rate
    assert OmegaConf.load("search/multirun.yaml").hydra.sweeper.n_trials == 5


def test_several_objectives_give_the_front():
    results = [(3.0, 10.0), (2.0, 20.0), (4.0, 5.0), (1.0, 1.0), (2.5, 25.0)]
    words = (LR, "sweep.objective=[val/loss,perf/tokens_per_s]", "hydra.sweeper.n_trials=5")
    study = search(Slots(lambda values, number: results[number]), *words)
    assert states(study) == [COMPLETE] * 5
    solutions = OmegaConf.load("search/optimization_results.yaml").solutions
    assert [(each.job, each["values"]) for each in solutions] == [(1, [2.0, 20.0]), (3, [1.0, 1.0]), (4, [2.5, 25.0])]


def test_a_search_in_which_all_failed_has_no_best():
    search(Slots(lambda values, number: None), LR, "hydra.sweeper.n_trials=2")
    assert not Path("search/optimization_results.yaml").exists()


PICTURES = [
    # n_trials  objective                              result                      drawn
    (5,         "val/loss",                            lambda v, n: v + n,         {"history.png", "importance.png"}),
    (5,         "[val/loss,perf/tokens_per_s]",        lambda v, n: (v, -n),       {"history.png", "importance.png"}),
    (5,         "val/loss",                            lambda v, n: 1.0,           {"history.png"}),
    (1,         "val/loss",                            lambda v, n: v,             set()),
]  # fmt: skip


@pytest.mark.parametrize(("count", "objective", "result", "expected"), PICTURES)
def test_pictures_are_drawn_from_two_jobs_on(count, objective, result, expected, capsys):
    slots = Slots(lambda values, number: None if number == 3 else result(values["optimizer.lr"], number))
    search(slots, LR, "seed=range(9)", f"hydra.sweeper.n_trials={count}", f"sweep.objective={objective}")
    assert {path.name for path in Path("search").glob("*.png")} == expected
    assert ("no importance.png: " in capsys.readouterr().err) == (expected == {"history.png"})


EDGES = [
    # values                      up        the frame ends at
    ([1, 2, 3, 2, 1, 99],         False,    2.75 + 3 * 1.5),
    ([-1, -2, -3, -2, -1, -99],   True,     -2.75 - 3 * 1.5),
    ([1, 2, 3],                   False,    3),
    ([1, 2, 3],                   True,     1),
    ([5, 5, 5, 5, 5, 9],          False,    math.inf),
]  # fmt: skip


@pytest.mark.parametrize(("values", "up", "edge"), EDGES)
def test_a_diverged_job_does_not_press_the_history_flat(values, up, edge):
    assert _pictures._edge(values, up) == pytest.approx(edge)


def test_pictures_that_cannot_be_drawn_cost_a_line(monkeypatch, capsys):
    def broken(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(_sweep, "draw", broken)
    assert states(search(Slots(lr), LR, "hydra.sweeper.n_trials=2")) == [COMPLETE, COMPLETE]
    assert "warning: no results of the search: OSError: no space left" in capsys.readouterr().err
