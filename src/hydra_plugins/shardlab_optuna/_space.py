"""What is searched: the overrides of the command line, as Optuna's distributions.

Everything that Optuna proposes becomes a text of Hydra's grammar in one way only, so the same proposal is the same
job. Choices are therefore kept as texts, numbers are written with all their digits, and the steps of a range are
counted in decimals: 0.1 + 2 * 0.1 is 0.3 here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep, Sweep, Transformer
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from shardlab.config.overrides import GROUPS
from shardlab.errors import ShardlabError

Value = str | int | float

CHOSEN_BY_NAME = (*GROUPS, "experiment")


@dataclass(frozen=True)
class Key:
    """One key that is searched.

    name: as in the config; written: how its override begins, up to the equals sign; text: its values as written
    steps: the lowest value of a range and the step; None for any other
    """

    name: str
    written: str
    text: str
    distribution: BaseDistribution
    steps: tuple[Decimal, Decimal] | None = None

    def value(self, proposed: Any) -> Value:
        """What the job gets for what Optuna proposed, which for steps that aren't whole is off by a rounding."""
        if self.steps is not None:
            low, step = self.steps
            exact = low + round((Decimal(proposed) - low) / step) * step
            return int(exact) if isinstance(self.distribution, IntDistribution) else float(exact)
        if isinstance(self.distribution, FloatDistribution):
            return float(proposed)
        return int(proposed) if isinstance(self.distribution, IntDistribution) else str(proposed)

    @property
    def first(self) -> Value:
        """Some value of its own: the lowest, or the first choice."""
        if isinstance(self.distribution, CategoricalDistribution):
            return str(self.distribution.choices[0])
        assert isinstance(self.distribution, FloatDistribution | IntDistribution)
        return self.value(self.distribution.low)


@dataclass(frozen=True)
class Space:
    """fixed: the overrides that every job gets as they are; keys: those that are searched, by name."""

    fixed: list[str]
    keys: dict[str, Key]

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """What Optuna is asked to choose from."""
        return {name: key.distribution for name, key in self.keys.items()}

    def values(self, params: Mapping[str, Any]) -> dict[str, Value]:
        """Name -> what the job gets. params: what Optuna proposed."""
        return {name: key.value(params[name]) for name, key in self.keys.items()}

    def overrides(self, values: Mapping[str, Value]) -> list[str]:
        """A job's overrides."""
        return self.fixed + [f"{key.written}={_text(values[name])}" for name, key in self.keys.items()]

    @property
    def samples(self) -> list[list[str]]:
        """The overrides of some jobs of the space: one, and one for each further name of a group."""
        first = {name: key.first for name, key in self.keys.items()}
        jobs = [first]
        for name, key in self.keys.items():
            if name in CHOSEN_BY_NAME and isinstance(key.distribution, CategoricalDistribution):
                jobs += [{**first, name: str(choice)} for choice in key.distribution.choices[1:]]
        return [self.overrides(job) for job in jobs]


def _text(value: Value) -> str:
    return value if isinstance(value, str) else repr(value)


def space_of(overrides: Sequence[Override]) -> Space:
    """The space that a command line's overrides describe; of two for one key the last counts, as for Hydra.

    Raises ShardlabError for values that can't be searched, or if there are none.
    """
    last = {override.key_or_group: override for override in overrides}
    fixed, keys = [], {}
    for name, override in last.items():
        if override.is_sweep_override():
            keys[name] = _key(override)
        else:
            fixed.append(str(override.input_line))
    if not keys:
        raise ShardlabError(
            "hydra/sweeper=shardlab_optuna has nothing to search; "
            "give some key several values, such as optimizer.lr=interval(0.001,0.1)"
        )
    return Space(fixed, keys)


def _key(override: Override) -> Key:
    name, written, text = override.key_or_group, override.get_key_element(), override.get_value_string()
    value = override.value()
    word = f"{name}={text}"
    if name.startswith("sweep."):
        raise ShardlabError(f"{word}: {name} is the sweep's own and the same for all of its jobs; give it one value")
    tags = value.tags if isinstance(value, Sweep) else set()
    if tags - {"log"}:
        raise ShardlabError(
            f"{word}: unknown tag {', '.join(sorted(tags - {'log'}))}; the one that means something is log"
        )
    if name in CHOSEN_BY_NAME and isinstance(value, IntervalSweep | RangeSweep):
        raise ShardlabError(f"{word}: {name} is chosen by name; give names, such as {name}=A,B, or glob(*)")
    if isinstance(value, IntervalSweep):
        return Key(name, written, text, _interval(word, value))
    if tags:
        raise ShardlabError(f"{word}: the tag log goes with an interval, such as tag(log,interval(0.001,0.1))")
    if isinstance(value, RangeSweep):
        return _range(name, written, text, value)
    # Not override.sweep_iterator() for choices: it would shuffle them, and no two commands would be the same search.
    texts = map(Transformer.str, value.list) if isinstance(value, ChoiceSweep) else override.sweep_string_iterator()
    choices = list(dict.fromkeys(texts))
    if not choices:
        raise ShardlabError(f"{word} matches no choice of {name}")
    return Key(name, written, text, CategoricalDistribution(choices))


def _interval(word: str, value: IntervalSweep) -> BaseDistribution:
    low, high, log = value.start, value.end, "log" in value.tags
    assert low is not None
    assert high is not None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ShardlabError(f"{word}: an interval goes from a lower number to a higher one")
    if log and low <= 0:
        raise ShardlabError(f"{word}: a logarithmic interval begins above 0")
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=log)
    return FloatDistribution(low, high, log=log)


def _range(name: str, written: str, text: str, value: RangeSweep) -> Key:
    numbers = (value.start, value.stop, value.step)
    if not all(number is not None and math.isfinite(number) for number in numbers) or value.step == 0:
        raise ShardlabError(f"{name}={text}: a range is range(START,STOP,STEP) of numbers, with a step that isn't 0")
    start, stop, step = (Decimal(repr(number)) for number in numbers)
    count = math.ceil((stop - start) / step)  # the end is left out, as everywhere in Hydra
    if count < 1:
        raise ShardlabError(f"{name}={text}: the range holds no value")
    low, high = sorted((start, start + (count - 1) * step))
    distribution: BaseDistribution
    if all(isinstance(number, int) for number in numbers):
        distribution = IntDistribution(int(low), int(high), step=int(abs(step)))
    else:
        distribution = FloatDistribution(float(low), float(high), step=float(abs(step)))
    return Key(name, written, text, distribution, (low, abs(step)))
