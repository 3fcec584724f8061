"""`shardlab parity`: train a few steps of one config under several splits, and say how far apart the runs are.

The candidates are the combinations of the values that the overrides list, as in a sweep. Those that are to train the
same (that differ in nothing but the split, the cut and the machine) are held against the first of them; one that is
alone is held against one process. All of them are composed and checked before anything starts. The runs are
ordinary ones, by the ordinary ranks, but for their length and their evaluations; no tracking server hears of them.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from shardlab.analysis.same import BOUNDS, QUANTITIES, Apart, Outcome, compare, read_outcome
from shardlab.analysis.table import text_table
from shardlab.config.check import Share, check, whole_machine
from shardlab.config.combinations import combinations
from shardlab.config.compose import composed_from, composing, config_yaml
from shardlab.config.schema import Config, RuntimeConfig, StrategyConfig, TrackingConfig
from shardlab.data.prepare import prepare
from shardlab.data.prepared import read_meta
from shardlab.errors import ShardlabError
from shardlab.launch.new_folder import check_place
from shardlab.launch.ranks import RanksFailed, run_ranks
from shardlab.launch.run import TRAIN_RANK
from shardlab.launch.signals import Signals
from shardlab.launch.streams import tell
from shardlab.parallel.mesh import mesh_of
from shardlab.training.length import run_length

STEPS, EVAL_BATCHES = 5, 2
"""How long a run is, and how many global batches its evaluation reads, where the overrides don't say."""

SINGLE = "strategy=single"
"""What the reference is called where the command names none."""


@dataclass
class Candidate:
    """One split of a training.

    label: the values that tell it from the others
    config: None if it was refused; training: a text that all share that are to train the same
    why: the reason why there is no outcome: it was refused, or failed
    """

    label: str
    config: Config | None
    training: str
    why: str | None = None
    outcome: Outcome | None = None

    def apart(self, reference: Outcome) -> list[Apart]:
        """The distance of each quantity from the reference's."""
        assert self.config is not None
        assert self.outcome is not None
        return compare(reference, self.outcome, BOUNDS[self.config.precision.name.name])


def parity(overrides: list[str], config_dir: str | None = None) -> int:
    """Run the candidates and print the table; 0: all are the same, 1: one is not, was refused or failed.

    config_dir: the user's folder of choices. Raises ShardlabError for a config that is wrong by itself, and where the
    first candidate is refused: then there is nothing to compare.
    """
    given = [word.partition("=")[2] for word in overrides if word.lstrip("+").startswith("run_dir=")]
    trainings = candidates([word for word in overrides if not word.lstrip("+").startswith("run_dir=")], config_dir)
    every = [each for training in trainings for each in training]
    with Signals() as signals, _folder(given[-1] if given else None) as folder:
        for number, each in enumerate(every):
            if each.config is not None:
                tell(f"{number + 1} of {len(every)}: {each.label}", sys.stderr)
                _train(each, folder / str(number), signals)
    rows, verdict, same = judge(trainings)
    tell(text_table(rows), sys.stdout)
    tell(verdict, sys.stdout)
    return 0 if same else 1


def candidates(overrides: list[str], config_dir: str | None = None) -> list[list[Candidate]]:
    """What is to be run: the candidates of each training, its reference first. Raises ShardlabError; see `parity`."""
    keys, jobs = combinations(overrides, config_dir)
    varied = set(keys) or {"strategy"}
    own_length = any(word.lstrip("+").startswith("trainer.steps=") for word in overrides)
    found: list[Candidate] = []
    for words in jobs:
        label = " ".join(word for word in words if word.partition("=")[0] in varied) or "as configured"
        found.append(_composed(label, list(words), config_dir, own_length))
        if found[0].why is not None:
            raise ShardlabError(found[0].why)
    ranks = max(mesh_of(each.config.strategy).ranks for each in found if each.config is not None)
    share = replace(whole_machine(), ranks=ranks)
    trainings: dict[str, list[Candidate]] = {}
    for candidate in found:
        _check(candidate, share)
        if found[0].why is not None:
            raise ShardlabError(found[0].why)
        trainings.setdefault(candidate.training or found[0].training, []).append(candidate)
    for training in trainings.values():
        _give_reference(training, share)
    return list(trainings.values())


def _composed(label: str, words: list[str], config_dir: str | None, own_length: bool) -> Candidate:
    """A candidate as composed, with a length for parity; or with the reason why it can't be."""
    try:
        with composing(words, config_dir=config_dir) as cfg:
            config = composed_from(cfg, cfg.hydra).config
    except ShardlabError as error:
        return Candidate(label, None, "", str(error))
    steps = config.trainer.steps if own_length and config.trainer.steps is not None else STEPS
    trainer = replace(config.trainer, steps=steps, epochs=None, eval_every=steps, test=False)
    config = replace(config, trainer=replace(trainer, eval_batches=trainer.eval_batches or EVAL_BATCHES))
    return Candidate(label, config, config_yaml(as_single(config)))


def as_single(config: Config) -> Config:
    """The same training in one process: without its split, its cut, and where it runs and is kept."""
    return replace(
        config,
        ranks=1,
        run_dir="-",
        strategy=StrategyConfig(name="single"),
        trainer=replace(config.trainer, micro_batch=None, micro_batches=None),
        runtime=RuntimeConfig(device=config.runtime.device),
        tracking=TrackingConfig(name="none"),
    )


def _check(candidate: Candidate, share: Share) -> None:
    if candidate.config is None:
        return
    try:
        candidate.config = check(candidate.config, share)
    except ShardlabError as error:
        candidate.config, candidate.why = None, str(error)


def _give_reference(training: list[Candidate], share: Share) -> None:
    """Put the reference first; one process, where a single candidate is left."""
    accepted = [each for each in training if each.config is not None]
    if len(accepted) > 1:
        training.sort(key=lambda each: each is not accepted[0])
    elif accepted and accepted[0].config is not None:
        alone, config = accepted[0], accepted[0].config
        single = Candidate(SINGLE, check(as_single(config), share), alone.training)
        if config.ranks > 1 or config.trainer.micro_batch or config.trainer.micro_batches:
            training.insert(0, single)
        elif len(training) == 1:
            raise ShardlabError(f"{alone.label} is compared with nothing; name a second one: strategy=single,ddp")


@contextlib.contextmanager
def _folder(given: str | None) -> Iterator[Path]:
    """Where the runs are kept: in a new folder of the user's, or for as long as the command lasts."""
    if given is None:
        with tempfile.TemporaryDirectory(prefix="shardlab-parity-", ignore_cleanup_errors=True) as temporary:
            yield Path(temporary)
        return
    folder = Path(given)
    check_place(folder, "run_dir")
    if folder.is_dir() and any(folder.iterdir()):
        raise ShardlabError(f"run_dir={folder} holds something already; give an empty folder or a new one")
    yield folder.absolute()
    tell(f"run folders: {folder}/0 and up, in the table's order", sys.stderr)


def _train(candidate: Candidate, folder: Path, signals: Signals) -> None:
    """Run a candidate; its outcome, or why there is none. Raises ShardlabError for wrong data."""
    config = candidate.config
    assert config is not None
    with signals.raising():
        data_dir = prepare(config.dataset, global_batch=config.trainer.global_batch)
        run_length(config, read_meta(data_dir))
    try:
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(config_yaml(config), encoding="utf-8")
        arguments = (config, folder, data_dir)
        run_ranks(TRAIN_RANK, arguments, config.ranks, log_dir=folder, timeout=config.runtime.timeout)
        candidate.outcome = read_outcome(folder)
    except RanksFailed as failed:
        candidate.why = failed.user_error or failed.reason
        if failed.user_error is None:
            tell(failed.text.rstrip(), sys.stderr)  # its log may be gone when somebody looks for it
    except OSError as error:
        raise ShardlabError(f"run_dir={folder.parent} can't be written: {error.strerror or error}") from error


def judge(trainings: list[list[Candidate]]) -> tuple[list[dict[str, str]], str, bool]:
    """The table's rows, the last line, and whether all candidates are the same as their references."""
    rows, wrong, largest = [], [], (0.0, "")
    for reference, *others in trainings:
        rows.append(_row(reference, "reference"))
        if reference.why is not None:
            wrong.append(f"{reference.label}: {reference.why}")
        for each in others:
            found: list[Apart] = []
            if each.outcome is not None and reference.outcome is not None:
                found = each.apart(reference.outcome)
                largest = max([largest, *((apart.largest, f"{apart.at} of {each.label}") for apart in found)])
            beyond = [apart for apart in found if apart.beyond is not None]
            if each.why is not None:
                wrong.append(f"{each.label}: {each.why}")
            elif beyond:
                wrong.append(f"{each.label}: {beyond[0].complaint}")
            result = "differs" if beyond else "same" if found else "not compared"
            rows.append(_row(each, result) | {apart.quantity: f"{apart.largest:.1e}" for apart in found})
    shown = f"largest difference {largest[0]:.1e}" + (f" ({largest[1]})" if largest[0] else "")
    if not any(row["result"] in ("same", "differs") for row in rows):
        shown = "nothing could be compared"
    return rows, f"not the same: {'; '.join(wrong)}; {shown}" if wrong else f"same; {shown}", not wrong


def _row(candidate: Candidate, result: str) -> dict[str, str]:
    if candidate.why is not None:
        result = "failed" if candidate.config is not None else "refused"
    ranks = "-" if candidate.config is None else str(candidate.config.ranks)
    return {"run": candidate.label, "ranks": ranks, **dict.fromkeys(QUANTITIES, "-"), "result": result}
