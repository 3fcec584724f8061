"""A run that is asked about ends where the answer says so, on all ranks at one step; the answer is the launcher's."""

from pathlib import Path

import pytest

from shardlab.config.check import check
from shardlab.config.compose import compose
from shardlab.data.prepare import prepare
from shardlab.launch.ranks import run_ranks
from shardlab.tracking.record import read_events


def arguments(folder: Path, *overrides: str):
    config = check(
        compose(
            [
                "model=tiny",
                "dataset=pydoc",
                "trainer.steps=6",
                "trainer.eval_every=2",
                "trainer.eval_batches=1",
                "runtime.threads=1",
                *overrides,
            ]
        ).config
    )
    return (config, folder, prepare(config.dataset)), config.ranks


@pytest.mark.parametrize("strategy", ["single", "ddp", "pipeline", "tensor"])
def test_a_pruned_run_ends_on_all_ranks_without_a_test(tmp_path: Path, strategy: str) -> None:
    asked = []

    def answer(step: int, values: dict[str, float]) -> bool:
        asked.append((step, values))
        return step == 4

    given, ranks = arguments(tmp_path, f"strategy={strategy}")
    run_ranks("shardlab.training.loop:train_rank", given, ranks, log_dir=tmp_path, answer=answer)
    events = read_events(tmp_path / "events.jsonl")
    evaluations = [event for event in events if event["event"] == "eval"]
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3, 4]
    assert [event["step"] for event in events if event["event"] == "pruned"] == [4]
    assert [(event["split"], event["step"]) for event in evaluations] == [("val", 2), ("val", 4)]
    assert [step for step, _ in asked] == [2, 4]
    for (_, values), event in zip(asked, evaluations, strict=True):
        assert values == {key: event[key] for key in ("loss", "targets", "perplexity")}
    assert all(event["event"] != "end" for event in events)
    written = [*tmp_path.glob("rank-*.jsonl")]
    assert len(written) == ranks - 1
    assert all([event["event"] for event in read_events(path)] == ["rank"] for path in written)


def test_a_run_that_is_never_pruned_ends_as_ever(tmp_path: Path) -> None:
    given, ranks = arguments(tmp_path, "strategy=ddp")
    run_ranks("shardlab.training.loop:train_rank", given, ranks, log_dir=tmp_path, answer=lambda step, values: False)
    events = read_events(tmp_path / "events.jsonl")
    assert [event["split"] for event in events if event["event"] == "eval"] == ["val", "val", "val", "test"]
    assert "pruned" not in {event["event"] for event in events}


def test_an_error_of_the_answer_is_the_launchers_own(tmp_path: Path) -> None:
    def answer(step: int, values: dict[str, float]) -> bool:
        raise ZeroDivisionError

    given, ranks = arguments(tmp_path, "strategy=ddp")
    with pytest.raises(ZeroDivisionError):
        run_ranks("shardlab.training.loop:train_rank", given, ranks, log_dir=tmp_path, answer=answer)
    assert [event["step"] for event in read_events(tmp_path / "events.jsonl") if event["event"] == "step"] == [1, 2]
