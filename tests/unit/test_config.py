"""A config composes to one typed thing, reads back from its own YAML, and leaves Hydra as it was found."""

import os
import re
from types import SimpleNamespace

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from shardlab.config.check import Share, check, gpu_names, settle
from shardlab.config.compose import compose, composing, config_yaml, to_config
from shardlab.config.optimizers import optimizers
from shardlab.config.overrides import GROUPS, packaged_choices
from shardlab.config.schema import CosineConfig, Device, Norm, NsmcConfig, Precision, PydocConfig
from shardlab.errors import ShardlabError

SIZES = [
    # model       layers  d_model  d_ff  heads
    ("tiny",      4,      64,      128,  4),
    ("small",     8,      256,     1024, 4),
    ("base",      12,     768,     3072, 12),
    ("tutorial",  12,     4096,    4096, 16),
]  # fmt: skip


@pytest.mark.parametrize(("name", "layers", "d_model", "d_ff", "heads"), SIZES)
def test_sizes_are_the_documented_ones(name, layers, d_model, d_ff, heads):
    model = compose([f"model={name}"]).config.model
    assert (model.name, model.n_layers, model.d_model, model.d_ff, model.n_heads) == (
        name,
        layers,
        d_model,
        d_ff,
        heads,
    )


@pytest.mark.parametrize("choice", [f"{group}={name}" for group in GROUPS for name in packaged_choices(group)])
def test_every_packaged_choice_passes_the_checks(choice):
    config = compose([choice, "ranks=4" if choice == "strategy=hybrid" else "ranks=1"]).config
    check(config, Share(cores=2, gpus=1 if choice == "precision=tf32" else 0))


@pytest.mark.parametrize("name", packaged_choices("experiment"))
def test_every_experiment_passes_the_checks(name):
    composed = compose([f"experiment={name}"])
    check(composed.config)
    assert composed.choices["experiment"] == name


def test_the_classic_setting_is_the_documented_one():
    config = compose(["experiment=tutorial_small"]).config
    model, trainer = config.model, config.trainer
    assert (model.n_layers, model.d_model, model.d_ff, model.n_heads, model.dropout) == (2, 200, 200, 2, 0.2)
    assert model.norm is Norm.post
    assert (config.dataset.name, config.dataset.seq_len) == ("wikitext2", 35)
    assert (trainer.global_batch, trainer.clip, trainer.epochs) == (20, 0.5, 3)
    assert (config.optimizer.name, config.optimizer.lr) == ("SGD", 5.0)
    assert (config.scheduler.name, config.scheduler.gamma, config.scheduler.every_epochs) == ("step", 0.95, 1)


def test_an_override_wins_over_the_experiment_and_the_experiment_over_the_defaults():
    assert compose(["experiment=demo"]).config.trainer.micro_batches == 4
    assert compose(["experiment=demo", "trainer.micro_batches=5"]).config.trainer.micro_batches == 5
    assert compose(["experiment=demo", "model=small"]).choices["model"] == "small"


def test_config_is_typed_all_the_way_down():
    config = compose(["dataset=nsmc", "scheduler=cosine", "precision=fp64"]).config
    assert isinstance(config.dataset, NsmcConfig)
    assert isinstance(config.scheduler, CosineConfig)
    assert config.precision.name is Precision.fp64
    assert isinstance(compose([]).config.dataset, PydocConfig)


def test_yaml_reads_back_to_the_same_config():
    composed, _ = settle(
        compose(["dataset=nsmc", "optimizer=sgd", "optimizer.kwargs.momentum=0.9", "trainer.clip=1e-3"])
    )
    read = to_config(OmegaConf.create(composed.yaml))
    assert read == composed.config
    assert config_yaml(read) == composed.yaml
    assert "${" not in composed.yaml


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"trainer": {"stepz": 3}}, "did you mean 'trainer.steps'?"),
        ({"model": {"n_layers": "two"}}, "model.n_layers must be a whole number"),
        ({"_target_": "os.system"}, "unknown key '_target_'"),
        ({"dataset": {"_target_": "os.system"}}, "unknown key 'dataset._target_'"),
    ],
)
def test_a_config_from_elsewhere_gets_past_nothing(change, said):
    logged = OmegaConf.merge(OmegaConf.create(compose([]).yaml), change)
    with pytest.raises(ShardlabError, match=r"^[^\n]*$") as refused:
        to_config(logged)
    assert said in str(refused.value)


SETTLED = [
    # overrides                                 ranks  note
    (["strategy=single"],                       1,     False),  # the default of ranks was nobody's wish
    (["strategy=single", "ranks=4"],            1,     True),
    (["strategy=single", "ranks=1"],            1,     False),
    (["strategy=ddp"],                          2,     False),
    (["strategy=ddp", "ranks=1"],               1,     False),
    (["strategy=ddp", "ranks=3"],               3,     False),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "ranks", "note"), SETTLED)
def test_ranks_are_those_of_the_mesh(overrides, ranks, note):
    composed, notes = settle(compose(overrides))
    assert composed.config.ranks == ranks
    assert bool(notes) == note
    assert settle(composed)[0] == composed, "settling twice changes nothing"


DEVICES = [
    # asked   GPUs  largest  taken  note
    ("auto",  0,    2,       "cpu",  False),
    ("auto",  1,    2,       "cpu",  True),
    ("auto",  2,    2,       "cuda", False),
    ("auto",  2,    4,       "cpu",  True),  # another job of the sweep needs four
    ("cpu",   2,    2,       "cpu",  False),
    ("cuda",  2,    2,       "cuda", False),
    ("cuda",  2,    4,       "cuda", False),  # that other job is refused, not this one moved
]  # fmt: skip


@pytest.mark.parametrize(("asked", "gpus", "largest", "taken", "note"), DEVICES)
def test_auto_takes_gpus_only_if_every_job_fits(asked, gpus, largest, taken, note):
    asked_for = compose(["strategy=ddp", "ranks=2", f"runtime.device={asked}"])
    composed, notes = settle(asked_for, Share(cores=2, gpus=gpus, ranks=largest))
    assert composed.config.runtime.device is Device(taken)
    assert bool(notes) == note


VISIBLE = [
    # device files             torch       CUDA_VISIBLE_DEVICES  visible
    ([],                       "'12.8'",   None,                 0),
    (["nvidia0", "nvidiactl"], "'12.8'",   None,                 1),
    (["nvidia0", "nvidia1"],   "None",     None,                 0),
    (["nvidia0", "nvidia1"],   "'12.8'",   "",                   0),
    (["nvidia0", "nvidia1"],   "'12.8'",   "1",                  1),
    (["nvidia0", "nvidia1"],   "'12.8'",   "0,-1,1",             1),
    (["nvidia0", "nvidia1"],   "'12.8'",   "0,5",                1),
    (["nvidia0", "nvidia1"],   "'12.8'",   "GPU-1a2b,GPU-3c4d",  2),
]  # fmt: skip


@pytest.mark.parametrize(("files", "built_for", "shown", "visible"), VISIBLE)
def test_gpus_are_counted_without_torch(files, built_for, shown, visible, monkeypatch, tmp_path):
    (tmp_path / "version.py").write_text(f"debug = False\ncuda: Optional[str] = {built_for}\n")
    torch = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr("shardlab.config.check.find_spec", lambda name: torch)
    monkeypatch.setattr("shardlab.config.check.DEVICES", tmp_path)
    for name in files:
        (tmp_path / name).touch()
    if shown is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert len(gpu_names.__wrapped__()) == visible


REFUSED = [
    (["strategy=ddp", "ranks=21"], "strategy.replicate=21 exceeds the 20 rows of trainer.global_batch"),
    (["runtime.threads=1000000"], "runtime.threads=1000000: at most [0-9]+ is taken"),
    (["strategy=ddp", "ranks=5000", "trainer.global_batch=5000"], "ranks=5000: at most"),
    (["model.d_ff=100000000000000"], "model.d_ff=100000000000000: at most"),
    (["model.n_layers=999999999999"], "model.n_layers=999999999999: at most"),
    (["dataset.seq_len=1000000000000"], "dataset.seq_len=1000000000000: at most"),
    (["dataset=synthetic", "dataset.train_tokens=1000000000000"], "at most 100000000 is taken"),
    (["trainer.steps=99999999999999999999999999"], "trainer.steps=99999999999999999999999999: at most"),
    (["optimizer.kwargs.betas=[0.9]"], "optimizer.kwargs: AdamW refuses"),
    (["dataset.path='~nobody-of-that-name/x'", "dataset=nsmc"], "there is no such user"),
    (["runtime.timeout=1e300"], "runtime.timeout=1e\\+300: at most 10000000 seconds would do"),
]


CODE = [
    (["+hydra.callbacks.x._target_=mine.C"], "hydra.callbacks would run code that the config names"),
    (["hydra.launcher._target_=os.system"], "hydra.launcher names 'os.system'"),
    (["hydra.sweeper._target_=mine.Sweeper"], "hydra.sweeper names 'mine.Sweeper'"),
    (["+hydra.job_logging.handlers.x.class=mine.F"], "hydra.job_logging names 'mine.F' to run"),
]


@pytest.mark.parametrize(("overrides", "said"), CODE)
def test_a_config_never_names_code_to_import(overrides, said):
    with pytest.raises(ShardlabError, match=re.escape(said)):
        compose(overrides)


ODD = [
    (["dataset.name=[1]"], "unknown dataset.name=[1]"),
    (["model=../model/tiny"], "model=../model/tiny leaves the group's folder"),
]


@pytest.mark.parametrize(("overrides", "said"), ODD)
def test_odd_choices_are_one_line(overrides, said):
    with pytest.raises(ShardlabError, match=re.escape(said)):
        compose(overrides)


@pytest.mark.parametrize("content", ["defaults: [mine]\n", "a: &a [*a]\n"])
def test_a_file_that_refers_to_itself_is_one_line(content, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text(content)
    with pytest.raises(ShardlabError), composing(["model=mine"], config_dir=str(tmp_path)):
        pass


def test_overrides_may_come_from_a_generator_and_nothing_else_is_lost():
    import shardlab

    with pytest.raises(ShardlabError, match=r"unknown key 'trainer\.stepz'"):
        shardlab.train(word for word in ["model=tiny", "trainer.stepz=1"])
    for wrong in (None, 5, {"seed": 1}, "model=tiny"):
        with pytest.raises(ShardlabError, match="takes a list of overrides"):
            shardlab.train(wrong)


@pytest.mark.parametrize(("overrides", "said"), REFUSED)
def test_what_could_only_fail_later_is_refused(overrides, said):
    with pytest.raises(ShardlabError, match=said):
        check(compose(overrides).config)


def test_a_path_is_logged_so_that_it_means_the_same_from_any_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "corpus").mkdir()
    assert check(compose(["dataset=nsmc", "dataset.path='~/corpus'"]).config).dataset.path == str(tmp_path / "corpus")
    assert check(compose(["dataset=nsmc", "dataset.path=corpus"]).config).dataset.path == str(tmp_path / "corpus")


@pytest.mark.parametrize(("ranks", "cores", "threads"), [(1, 8, 8), (2, 8, 4), (3, 8, 2), (4, 2, 1)])
def test_threads_share_the_cores_evenly(ranks, cores, threads, monkeypatch):
    monkeypatch.setattr("shardlab.config.check.available_cores", lambda: cores)
    assert check(compose(["strategy=ddp", f"ranks={ranks}"]).config).runtime.threads == threads


@pytest.mark.parametrize("name", ["RMSprop", "Adagrad", "NAdam", "Adafactor"])
@pytest.mark.parametrize("preset", ["sgd", "adam", "adamw"])
def test_any_optimizer_works_from_any_preset(name, preset):
    check(compose([f"optimizer={preset}", f"optimizer.name={name}", "optimizer.lr=0.01"]).config)


def test_optimizers_read_from_source_are_those_of_torch():
    """The source is parsed because importing torch takes seconds; this guards the reading against the real thing."""
    import inspect

    import torch

    real = {
        name: [key for key in inspect.signature(kind.__init__).parameters if key not in ("self", "params", "lr")]
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    assert {name: list(arguments) for name, arguments in optimizers().items()} == real


def test_composing_leaves_another_hydra_application_alone():
    with compose_elsewhere():
        before = (GlobalHydra.instance().hydra, HydraConfig.instance().cfg, os.environ.get("HYDRA_FULL_ERROR"))
        compose(["model=small"])
        with pytest.raises(ShardlabError):
            compose(["model=smal"])
        assert HydraConfig.instance().cfg is before[1]
        assert GlobalHydra.instance().is_initialized()
        assert os.environ.get("HYDRA_FULL_ERROR") == before[2]
    assert not GlobalHydra.instance().is_initialized()


def compose_elsewhere():  # another application, as far as Hydra knows
    from hydra import initialize_config_module

    return initialize_config_module("shardlab.conf", version_base="1.2")


@pytest.mark.parametrize(
    ("overrides", "rows"),
    [
        (["strategy=pipeline"], 2),  # 20 rows, two stages: ten parts
        (["strategy=pipeline", "ranks=4", "model.n_layers=4"], 1),
        (["strategy=hybrid", "ranks=4", "strategy.tensor=1", "strategy.replicate=2"], 1),
        (["strategy=pipeline", "trainer.global_batch=64"], 8),
        (["strategy=pipeline", "trainer.micro_batches=3"], None),
        (["strategy=pipeline_naive"], None),
        (["strategy=tensor"], None),
    ],
)
def test_a_pipeline_gets_at_least_four_parts_a_stage(overrides, rows):
    assert check(compose(overrides).config).trainer.micro_batch == rows


@pytest.mark.parametrize("strategy", ["single", "ddp", "tensor"])
def test_a_split_is_nothing_without_a_pipeline(strategy):
    """`-m strategy=single,pipeline strategy.split=[3,1]` once built single without its last layer and head."""
    assert check(compose([f"strategy={strategy}", "strategy.split=[3,1]"]).config).strategy.split is None


def test_the_split_that_an_error_offers_is_accepted():
    with pytest.raises(ShardlabError) as refused:
        check(compose(["strategy=pipeline", "ranks=6", "strategy.split=[1,1,1,1,0,0]"]).config)
    [offered] = re.findall(r"; (\[[0-9,]+\]) would do", str(refused.value))
    check(compose(["strategy=pipeline", "ranks=6", f"strategy.split={offered}"]).config)


def test_notes_say_what_a_pipeline_replaces_or_leaves_unused():
    few = ["strategy=pipeline", "ranks=3", "trainer.micro_batches=2"]
    assert settle(compose(few))[1] == ["2 micro-batches a copy on 3 stages: gpipe takes the place of 1f1b"]
    assert settle(compose([*few, "strategy.schedule=gpipe"]))[1] == []
    one = settle(compose(["strategy=pipeline", "trainer.micro_batch=20"]))[1][0]
    assert one == "1 micro-batch a copy on 2 stages: gpipe takes the place of 1f1b"
    unused = ["strategy=tensor", "strategy.split=[3,1]"]
    assert settle(compose(unused))[1] == ["strategy.pipeline=1: strategy.split is left unused"]


def test_a_classifier_has_nothing_to_tie():
    check(compose(["strategy=pipeline", "model.tie=true", "dataset=nsmc"]).config)
