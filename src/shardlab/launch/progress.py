"""What a run shows while it goes on: a bar on a terminal, a line now and then elsewhere.

It reads the run record as everybody else does, so the ranks know nothing of it. A reader that went away (a closed
pipe) costs the progress, not the run.
"""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from shardlab.errors import ShardlabError
from shardlab.launch.streams import give_up
from shardlab.tracking.record import EVENTS, Event, Tail

if TYPE_CHECKING:
    from tqdm import tqdm

LINE_SECONDS = 10.0
"""Seconds between two lines where there is no terminal."""

SHOWN = ("loss", "perplexity", "accuracy", "f1", "precision", "recall")


class Progress:
    """Follows one run's record. name: shown in front; stream: where to, standard error by default."""

    def __init__(self, folder: Path, name: str, stream: TextIO | None = None) -> None:
        self._tail = Tail(folder / EVENTS)
        self._name = name
        self._stream = sys.stderr if stream is None else stream
        self._bar: tqdm[Any] | None = None
        self._start: Event = {}
        self._pending: Event | None = None
        self._printed = time.monotonic()
        self._tokens, self._seconds = 0, 0.0
        self._shows = True

    def update(self) -> None:
        """Show what is new."""
        if not self._shows:
            return
        try:
            for event in self._tail.events():
                self._take(event)
            if self._pending and self._bar is None and time.monotonic() - self._printed >= LINE_SECONDS:
                self._say(self._pending)
        except (OSError, ShardlabError) as error:
            self._hide(error)

    def close(self) -> None:
        """Show the last step, and leave the terminal's line to others."""
        self.update()
        try:
            if self._bar is not None:
                self._bar.close()
            elif self._pending and self._shows:
                self._say(self._pending)
        except OSError as error:
            self._hide(error)

    def _hide(self, error: Exception) -> None:
        self._shows = False
        if isinstance(error, OSError):
            give_up(self._stream)

    def _take(self, event: Event) -> None:
        if event["event"] == "start":
            self._start = event
            stages = event.get("stages", [])
            cut = f", stages of {' + '.join(map(str, stages))} layers" if len(stages) > 1 else ""
            size = f"{event.get('total_steps')} steps, {event.get('parameters', 0):,} parameters"
            self._write(f"{self._name}: {size}{cut}")
            if self._stream.isatty():
                from tqdm import tqdm

                self._bar = tqdm(
                    total=event.get("total_steps"), unit="step", file=self._stream, dynamic_ncols=True, desc=self._name
                )
        elif event["event"] == "step":
            self._tokens += event["tokens"]
            self._seconds += event["seconds"]
            self._pending = event
            if self._bar is not None:
                self._bar.set_postfix_str(f"loss {event['loss']:.4g}, {self._rate()}", refresh=False)
                self._bar.update(event["step"] - self._bar.n)
        elif event["event"] == "eval":
            if self._pending and self._bar is None:
                self._say(self._pending)
            self._write(f"{self._name}: step {event['step']}, {event['split']} {shown(event)}")

    def _rate(self) -> str:
        """Tokens a second over the steps since the last line."""
        return f"{self._tokens / self._seconds:,.0f} tokens/s" if self._seconds else "no rate yet"

    def _say(self, step: Event) -> None:
        total = self._start.get("total_steps")
        self._write(f"{self._name}: step {step['step']}/{total}, loss {step['loss']:.4g}, {self._rate()}")
        self._pending, self._printed = None, time.monotonic()
        self._tokens, self._seconds = 0, 0.0

    def _write(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
        else:
            print(line, file=self._stream, flush=True)


def shown(evaluation: Event) -> str:
    """An evaluation's values for a person: "loss 4.123, perplexity 61.7"."""
    return ", ".join(f"{key} {evaluation[key]:.5g}" for key in SHOWN if evaluation.get(key) is not None)
