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
    """In what numbers are computed.

    fp32, fp64: everything; bf16, fp16: products and what comes of them, while parameters, gradients and the optimizer
    stay in fp32 (fp16 with a dynamic loss scale); tf32: fp32 whose products round their factors, on GPUs that can
    """

    fp32 = "fp32"
    fp64 = "fp64"
    bf16 = "bf16"
    fp16 = "fp16"
    tf32 = "tf32"


class OnNonFinite(Enum):
    """What becomes of a step whose loss or gradient norm is not finite: it ends the run, or leaves the model alone."""

    stop = "stop"
    skip = "skip"


class Device(Enum):
    """auto takes CUDA if every job of the command fits on the visible GPUs, and the CPU otherwise."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


# Functional, since a name here is what a user writes, and 1f1b is no identifier.
Schedule = Enum(
    "Schedule",
    {
        "naive": "naive",
        "gpipe": "gpipe",
        "1f1b": "1f1b",
        "interleaved_1f1b": "interleaved_1f1b",
        "looped_bfs": "looped_bfs",
        "interleaved_zero_bubble": "interleaved_zero_bubble",
        "zbv": "zbv",
        "dualpipev": "dualpipev",
    },
)
"""The order of a pipeline's forwards and backwards; parallel/orders.py says what each does, and where it comes from."""


class ShardLevel(Enum):
    """What the shard axis cuts, as levels 1, 2 and 3 of ZeRO (Rajbhandari et al. 2020): each also what is above it."""

    optimizer = "optimizer"
    gradients = "gradients"
    parameters = "parameters"


class Reduce(Enum):
    """Who sums gradients over the data axes: the backend (gloo, nccl), or the ring that parallel/ring.py writes out."""

    backend = "backend"
    ring = "ring"


class Checkpoint(Enum):
    """Which micro-batches' activations are computed again in the backward pass instead of being kept.

    except_last (Kim et al. 2020): all but the last micro-batch of a step, whose backward comes at once
    """

    never = "never"
    always = "always"
    except_last = "except_last"


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

    shard_level: what the shard axis cuts; see ShardLevel
    schedule: of a pipeline; see Schedule
    stages_per_rank: of a pipeline; null takes as many as the schedule is made for, one or two
    split: layers of each stage of a pipeline; null cuts by estimated cost
    reduce: who sums gradients; see Reduce
    sequence_parallel: between the split matrices of the tensor axis, a rank holds a slice of each sequence
    activation_checkpoint: see Checkpoint
    """

    name: str = MISSING
    replicate: int = 1
    shard: int = 1
    pipeline: int = 1
    tensor: int = 1
    shard_level: ShardLevel = ShardLevel.parameters
    schedule: Schedule = Schedule["1f1b"]
    stages_per_rank: int | None = None
    split: list[int] | None = None
    reduce: Reduce = Reduce.backend
    sequence_parallel: bool = False
    activation_checkpoint: Checkpoint = Checkpoint.never


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
    on_nonfinite: see OnNonFinite
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
    on_nonfinite: OnNonFinite = OnNonFinite.stop
    test: bool = True


@dataclass
class RuntimeConfig:
    """threads: per rank; null shares the cores evenly.

    timeout: seconds that a rank may be silent: neither a step nor a micro-batch, nor a part of an evaluation; then it
    hangs, and the run is ended
    compile: let torch.compile make each layer's kernels
    """

    device: Device = Device.auto
    threads: int | None = None
    compile: bool = False
    timeout: float = 600.0


@dataclass
class PlanConfig:
    """What `shardlab plan` is asked beside the run. memory_gib: of a rank, to say what fits in it"""

    memory_gib: float | None = None


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
    plan: PlanConfig = field(default_factory=PlanConfig)


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
