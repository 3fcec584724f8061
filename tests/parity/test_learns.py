"""It learns: on sources whose best possible result is known, `tiny` comes as close as the issue of its making asked."""

from __future__ import annotations

from pathlib import Path

from trained import Trained, train

COMMON = ["model=tiny", "optimizer=adamw", "tracking=none"]


def facts(run: Trained) -> dict:
    """What the dataset knows of itself."""
    return next(event for event in run.events if event["event"] == "start")["dataset"]


def last_validation(run: Trained) -> dict:
    return [event for event in run.events if event["event"] == "eval"][-1]


def test_language_model_comes_within_2_percent_of_the_sources_entropy(tmp_path: Path):
    overrides = ["dataset=synthetic", "optimizer.lr=2e-3", "trainer.global_batch=16", "trainer.steps=600"]
    run = train(tmp_path / "run", [*COMMON, *overrides])
    entropy, entropy_of_one = facts(run)["entropy"], facts(run)["entropy_of_one"]
    assert entropy < last_validation(run)["loss"] < 1.02 * entropy
    assert entropy_of_one > 1.2 * entropy  # counting symbols, or seeing only the last one, would not do


def test_classifier_comes_within_a_point_of_the_best_possible(tmp_path: Path):
    overrides = ["dataset=synthetic", "dataset.task=classifier", "optimizer.lr=1e-3", "trainer.global_batch=64"]
    run = train(tmp_path / "run", [*COMMON, *overrides, "trainer.steps=250"])
    assert facts(run)["best_accuracy"] - last_validation(run)["accuracy"] < 0.01
