"""The typed shape of a config: what may be set, and of which type.

The YAML groups in conf/ fill these dataclasses; `compose.py` merges one into the other, so that an unknown key
or a wrong type never gets past composition. Fields without a default are MISSING on purpose: a group that a
user deleted (`~model`) must fail, not train something else. Ranges and rules across fields are in `check.py`.
Nothing here imports torch: the command line must answer `--help` and a wrong key at once.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING


class Norm(Enum):
    """Where a block normalises: after each residual sum (Vaswani et al. 2017) or before each sub-layer."""

    post = "post"
    pre = "pre"


class Activation(Enum):
    """The feed-forward non-linearity."""

    relu = "relu"
    gelu = "gelu"


class Positions(Enum):
    """How a position enters the embedding: a fixed sinusoid or a learned vector."""

    sinusoidal = "sinusoidal"
    learned = "learned"


class Task(Enum):
    """What the dataset asks of the model."""

    language_model = "language_model"
    classifier = "classifier"


class Tokens(Enum):
    """wikitext2's tokens: torchtext's basic_english, or the corpus's own words with <eos> at a line's end."""

    basic_english = "basic_english"
    words = "words"


class Tokenizer(Enum):
    """nsmc's word pieces: the multilingual BERT vocabulary, or one trained on the training text."""

    multilingual_bert = "multilingual_bert"
    trained = "trained"


class Precision(Enum):
    """The dtype of parameters, activations and gradients."""

    fp32 = "fp32"
    fp64 = "fp64"


class Device(Enum):
    """auto takes CUDA if every job of the command fits on the visible GPUs, and the CPU otherwise."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


# Functional, since a name here is what a user writes, and 1f1b is no identifier.
Schedule = Enum("Schedule", {"gpipe": "gpipe", "1f1b": "1f1b", "naive": "naive"})
"""The order of a pipeline's forwards and backwards: all forwards first (Huang et al. 2019), one forward and one
backward in turn (Narayanan et al. 2019), or each micro-batch alone, one stage after the other."""


@dataclass
class ModelConfig:
    """A size of the Transformer; the dataset decides its task and vocabulary."""

    name: str = MISSING
    n_layers: int = MISSING
    d_model: int = MISSING
    n_heads: int = MISSING
    d_ff: int = MISSING
    dropout: float = MISSING
    norm: Norm = MISSING
    activation: Activation = MISSING
    positions: Positions = MISSING
    tie: bool = MISSING


@dataclass
class StrategyConfig:
    """A point in the mesh: the size of each axis, 1 where a file names none. Their product is the number of ranks.

    schedule: of a pipeline; see Schedule
    split: layers of each stage of a pipeline; null cuts by estimated cost
    """

    name: str = MISSING
    replicate: int = 1
    shard: int = 1
    pipeline: int = 1
    tensor: int = 1
    schedule: Schedule = Schedule["1f1b"]
    split: list[int] | None = None


AXES = ("pipeline", "replicate", "shard", "tensor")
"""The axes of the mesh, as keys of a strategy; outermost first."""


@dataclass
class TextConfig:
    """A language-model corpus read from text files (wikitext2)."""

    name: str = MISSING
    path: str | None = None
    tokens: Tokens = MISSING
    seq_len: int = MISSING


@dataclass
class PydocConfig:
    """The language reference that every CPython carries; needs no download."""

    name: str = MISSING
    seq_len: int = MISSING


@dataclass
class NsmcConfig:
    """Naver sentiment movie corpus. max_length: word pieces per row, [CLS] and [SEP] included."""

    name: str = MISSING
    path: str | None = None
    tokenizer: Tokenizer = MISSING
    max_length: int = MISSING
    validation_rows: int = MISSING


@dataclass
class SyntheticConfig:
    """Generated sources whose best possible result is known. rows: of the classifier; tokens: of the language model."""

    name: str = MISSING
    task: Task = MISSING
    seq_len: int = MISSING
    train_tokens: int = MISSING
    train_rows: int = MISSING


@dataclass
class OptimizerConfig:
    """Any class of torch.optim by its name; kwargs are its other keyword arguments."""

    name: str = MISSING
    lr: float = MISSING
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class ConstantConfig:
    """The learning rate stays as it is."""

    name: str = MISSING


@dataclass
class StepConfig:
    """The learning rate is multiplied by gamma after every `every_epochs` epochs."""

    name: str = MISSING
    gamma: float = MISSING
    every_epochs: int = MISSING


@dataclass
class CosineConfig:
    """A linear warm-up over warmup_steps, then half a cosine down to lr * final_ratio at the last step."""

    name: str = MISSING
    warmup_steps: int = MISSING
    final_ratio: float = MISSING


@dataclass
class PrecisionConfig:
    """See Precision."""

    name: Precision = MISSING


@dataclass
class TrackingConfig:
    """name: mlflow or none. uri and experiment fall back to MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME."""

    name: str = MISSING
    uri: str | None = None
    experiment: str | None = None
    run_name: str | None = None


@dataclass
class TrainerConfig:
    """How long and in which batches to train. All batch sizes are global.

    steps, epochs: training ends at whichever comes first; neither means one epoch
    epoch_steps: cut an epoch after that many steps
    eval_batches: cut an evaluation after that many global batches
    micro_batch: rows of a micro-batch of the global cut; micro_batches: their number. Give at most one
    clip: largest gradient norm; null does not clip
    eval_every: steps between evaluations; null evaluates after each epoch
    test: evaluate the best model on the test split at the end
    """

    steps: int | None = None
    epochs: int | None = None
    epoch_steps: int | None = None
    eval_batches: int | None = None
    global_batch: int = MISSING
    micro_batch: int | None = None
    micro_batches: int | None = None
    clip: float | None = None
    eval_every: int | None = None
    test: bool = True


@dataclass
class RuntimeConfig:
    """threads: per rank; null shares the cores evenly.

    timeout: seconds that a rank may be silent: neither a step nor a micro-batch, nor a part of an evaluation; then it
    hangs, and the run is ended
    """

    device: Device = Device.auto
    threads: int | None = None
    timeout: float = 600.0


@dataclass
class SweepConfig:
    """What a command with -m does beside its runs; the same for all of its jobs.

    parallel: jobs at the same time, each on its own share of the cores or GPUs
    fail_fast: the first job that fails ends the sweep
    objective: what a job hands to the sweeper, one name or a list of them; see config/objectives.py
    """

    parallel: int = 1
    fail_fast: bool = False
    objective: Any = "val/loss"


@dataclass
class Config:
    """One training run. `dataset` and `scheduler` hold the dataclass that their name chooses (see CHOSEN)."""

    seed: int = MISSING
    ranks: int = MISSING
    run_dir: str = MISSING
    model: ModelConfig = field(default_factory=ModelConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    dataset: Any = MISSING
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: Any = MISSING
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)


CHOSEN: dict[str, dict[str, type]] = {
    "dataset": {
        "wikitext2": TextConfig,
        "pydoc": PydocConfig,
        "nsmc": NsmcConfig,
        "synthetic": SyntheticConfig,
    },
    "scheduler": {"constant": ConstantConfig, "step": StepConfig, "cosine": CosineConfig},
}
"""Groups whose keys depend on the choice: the value of their `name` picks the dataclass."""
