"""A wrong input ends in one line that names the mistake and what would work; nothing is started or left behind."""

import os
import time
from pathlib import Path

import pytest

from shardlab.cli import main

WRONG = [
    # words                                                        what the line must say
    ("train trainer.stepz=3", "unknown key 'trainer.stepz'; did you mean 'trainer.steps'?"),
    ("train +trainer.stepz=3", "unknown key 'trainer.stepz'; did you mean 'trainer.steps'?"),
    ("train ++trainer.stepz=3", "unknown key 'trainer.stepz'; did you mean 'trainer.steps'?"),
    ("train +trainer.stepz=3 --cfg job", "unknown key 'trainer.stepz'; did you mean 'trainer.steps'?"),
    ("train +trainer.steps=3 trainer.steps=4 +seed=3", "seed exists: set it without the plus sign"),
    ("train epochs=3", "did you mean 'trainer.epochs'?"),
    ("train modle=small", "unknown key 'modle'; did you mean 'model'?"),
    ("train dataset.max_length=32", "belongs to dataset=nsmc"),
    ("train scheduler.gamma=0.5", "belongs to scheduler=step"),
    ("train trainer.steps=two", "trainer.steps must be a whole number, not 'two'"),
    ("train trainer.steps=2.5", "trainer.steps must be a whole number, not '2.5'"),
    ("train optimizer.lr=fast", "optimizer.lr must be a number, not 'fast'"),
    ("train dataset.seq_len=many", "dataset.seq_len must be a whole number, not 'many'"),
    ("train trainer.test=perhaps", "trainer.test must be true or false"),
    ("train trainer={steps:3,epoch:1}", "unknown key 'trainer.epoch'; did you mean 'trainer.epochs'?"),
    ("train trainer=3", "trainer holds several keys; set trainer.KEY"),
    ("train model@other=tiny", "'model@other=tiny' would put a choice at another place"),
    ("train seed=null", "seed must not be null"),
    ("train model.norm=middle", "it is one of post, pre"),
    ("train model=smal", "unknown model=smal; did you mean 'small'? (model is one of base, small, tiny, tutorial)"),
    ("train +models=small", "unknown key 'models'; did you mean 'model'?"),
    ("train precision=fp8", "unknown precision=fp8"),
    ("train precision=tf32 runtime.device=cpu", "and this run is on the CPU; precision=fp32, or bf16"),
    ("train trainer.on_nonfinite=ignore", "it is one of stop, skip"),
    ("train dataset=wikitext", "did you mean 'wikitext2'?"),
    ("train ~model", "'~model' takes a part of the config away"),
    ("train ~trainer.global_batch", "'~trainer.global_batch' takes a part of the config away"),
    ("train model=[tiny,small]", "model takes one choice, not a list; to run each of them: -m model=tiny,small"),
    ("train model=1", "model=1 is no choice; model is one of base, small, tiny, tutorial"),
    ("train model=null", "model=null is no choice"),
    ("train dataset.name=nsmc", "key 'dataset.seq_len' belongs to dataset=wikitext2"),
    ("train dataset.name=imdb", "unknown dataset.name=imdb"),
    ("train experiment=typo", "unknown experiment=typo (experiment is one of demo, "),
    ("train experiment=tutorial_smal", "did you mean 'tutorial_small'?"),
    ("train --config-dir nowhere", "nowhere: no such folder"),
    ("train hydra.searchpath=[file://nowhere]", "nowhere: no such folder"),
    ("train --config-dir shadowing model=small", "would not be read: shardlab has a model/small.yaml of its own"),
    ("train --config-dir broken model=broken", "broken.yaml line 2: not YAML"),
    ("train --config-dir broken model=typo", "model/typo.yaml: unknown key 'model.d_modle'; did you mean 'model.d_mod"),
    ("train --config-dir broken experiment=typo2", "unknown key 'trainer.stepz'"),
    ("train --config-dir broken model=words", "model/words"),
    ("train --config-dir latin model=latin", "latin.yaml"),
    ("train --config-dir broken model=part", "model.d_ff must be given"),
    ("train --config-name mine", "no config named 'mine'"),
    ("train -m run_dir=here seed=1,2", "set hydra.sweep.dir=FOLDER"),
    ("train hydra.run.dir=here", "set run_dir=FOLDER instead"),
    ("train seed=1,2", "'seed=1,2' holds several values; add -m to run each"),
    ("train -m --cfg job", "--cfg and -m exclude each other"),
    ("train -m model=tiny,smal", "unknown model=smal; did you mean 'small'?"),
    ("train -m trainer.stepz=1,2", "unknown key 'trainer.stepz'; did you mean 'trainer.steps'?"),
    ("train -m model=tiny,[small]", "model takes one choice, not a list"),
    ("train ranks=0", "ranks=0: it must be at least 1"),
    ("train strategy=ddp ranks=2 strategy.replicate=3", "set ranks=3 or strategy.replicate=2"),
    ("train strategy.replicate=2", "has strategy.replicate=1, not 2; strategy=ddp with ranks=2 would do"),
    ("train strategy.tensor=2", "has strategy.tensor=1, not 2; strategy=tensor with ranks=2 would do"),
    ("train strategy=ddp strategy.pipeline=2", "strategy.pipeline=1, not 2; strategy=hybrid takes any product of axes"),
    ("train strategy.shard=2", "has strategy.shard=1, not 2; strategy=zero3 with ranks=2 would do"),
    ("train strategy=hybrid ranks=2", "the axes of strategy=hybrid make 4 ranks, but ranks=2; set ranks=4"),
    ("train strategy=tensor ranks=3", "strategy.tensor=3 does not divide model.n_heads=4; 1, 2 or 4 would"),
    ("train strategy=tensor model.d_ff=30 ranks=4", "strategy.tensor=4 does not divide model.d_ff=30; 1 or 2 would"),
    ("train strategy=tensor optimizer.name=Adafactor", "strategy.tensor=2 cuts them; an elementwise one (AdamW, SGD)"),
    ("train strategy=pipeline ranks=7", "more stages than model.n_layers=4 can fill; at most 6 would do"),
    ("train strategy=zero1 strategy.shard_level=parameters", "not parameters; strategy=zero3 has that"),
    ("train strategy=zero2 optimizer.name=Adafactor", "strategy.shard=2 cuts them; an elementwise one (AdamW, SGD)"),
    ("train strategy=zero3 trainer.global_batch=1", "strategy.shard=2 exceeds the 1 rows of trainer.global_batch"),
    ("train strategy=pipeline strategy.schedule=zbv strategy.stages_per_rank=3", "interleaved_1f1b takes any number"),
    (
        "train strategy=pipeline ranks=3 strategy.schedule=zbv model.n_layers=3",
        "strategy.schedule=1f1b with one a rank",
    ),
    ("train strategy=pipeline strategy.stages_per_rank=0", "strategy.stages_per_rank=0: it must be at least 1"),
    ("train strategy.reduce=tree", "it is one of backend, ring"),
    ("train strategy.activation_checkpoint=some", "it is one of never, always, except_last"),
    ("train strategy=pipeline strategy.split=[5,3]", "makes 8 layers, and model.n_layers=4; [2,2] would do"),
    ("train strategy=pipeline strategy.split=[4]", "has a length of 1, and there are 2 stages; [2,2] would do"),
    ("train strategy=pipeline ranks=3 strategy.split=[2,0,2]", "a stage between the ends needs a layer"),
    ("train strategy=pipeline strategy.split=[-1,5]", "a stage can't have fewer than 0 layers; [2,2] would do"),
    ("train strategy=pipeline strategy.split=5", "strategy.split must be a list, such as strategy.split=[3,1]"),
    ("train strategy=pipeline strategy.split=[a,b]", "strategy.split[0] must be a whole number, not 'a'"),
    ("train strategy=pipeline strategy.split=[[2],[2]]", "split[0] must be a whole number, not '[2]'"),
    ("train strategy=pipeline strategy.split=[null,4]", "strategy.split[0]"),
    ("train strategy=pipeline strategy.split.0=3", "give the whole list, such as strategy.split=[3,1]"),
    ("train model.n_layers=2000", "model.n_layers=2000: at most 1024 is taken"),
    ("train strategy=pipeline strategy.schedule=1fb1", "it is one of naive, gpipe, 1f1b"),
    ("train strategy=pipeline_naive strategy.schedule=gpipe", "strategy=pipeline takes every schedule"),
    ("train strategy=pipelin", "unknown strategy=pipelin; did you mean 'pipeline'?"),
    ("train strategy=ddp strategy.replicate=${rank}", "strategy.replicate: Interpolation key 'rank' not found"),
    ("train optimizer.name=Adamm", "unknown optimizer.name=Adamm; did you mean 'Adam'?"),
    ("train optimizer.name=LBFGS", "optimizer.name=LBFGS cannot be used: it evaluates the loss several times"),
    ("train optimizer.kwargs.momentu=0.9 optimizer=sgd", "SGD has no such argument; did you mean 'momentum'?"),
    ("train optimizer.kwargs.momentum=-1 optimizer=sgd", "SGD refuses {'momentum': -1}: Invalid momentum value: -1"),
    ("train optimizer.kwargs.lr=1", "the learning rate is optimizer.lr"),
    ("train optimizer.lr=-1", "optimizer.lr=-1.0: it must be a number above 0"),
    ("train optimizer.lr=nan", "optimizer.lr=nan: it must be a number above 0"),
    ("train trainer.micro_batch=4 trainer.micro_batches=5", "give one of them"),
    ("train trainer.micro_batches=21", "exceeds the 20 rows of trainer.global_batch"),
    ("train trainer.steps=0", "trainer.steps=0: it must be at least 1"),
    ("train trainer.clip=0", "trainer.clip=0.0: it must be a number above 0"),
    ("train model.n_heads=5", "does not divide model.d_model=64; 1, 2, 4 or 8 would"),
    ("train model.d_model=63 model.n_heads=3", "model.d_model=63 is odd"),
    ("train model.dropout=1.0", "model.dropout=1.0: it must be at least 0 and below 1"),
    ("train scheduler=step scheduler.gamma=1.5", "scheduler.gamma=1.5"),
    ("train scheduler=cosine scheduler.warmup_steps=50 trainer.steps=50", "leaves nothing of the run's 50 steps"),
    ("train seed=-1", "a seed lies between 0 and"),
    ("train seed=99999999999999", "a seed lies between 0 and"),
    ("train runtime.threads=0", "runtime.threads=0: it must be at least 1"),
    ("train runtime.timeout=-5", "runtime.timeout=-5.0"),
    ("train dataset=nsmc dataset.path=nowhere", "dataset.path=nowhere: no such file or folder"),
    ("train tracking.name=wandb", "it is mlflow or none"),
    ("train run_dir=/proc/1/nothing", "/proc/1/nothing"),
    ("train model=tiny,", "cannot read 'model=tiny,'"),
    ("train seed", "cannot read 'seed'"),
    ("train trainer.steps=[1", "cannot read 'trainer.steps=[1'"),
    ("train --no-such-flag", "--no-such-flag"),
    ("train --confg-dir here", "did you mean '--config-dir'?"),
    ("train --cfg jobs", "invalid choice: 'jobs'"),
    ("train --experimental-rerun x", "would unpickle a file"),
    ("trian model=tiny", "unknown command 'trian'; did you mean 'train'?"),
    ("model=tiny", "did you mean 'shardlab train model=tiny'?"),
    ("", "which command?"),
    ("compare", "the following arguments are required: RUN"),
    ("compare broken_yaml", "broken_yaml holds no run: provenance.json and config.yaml, both whole, are needed"),
    ("compare torn", "torn holds no run"),
    ("compare not_ours", "not_ours holds no run"),
    ("sync broken_yaml", "broken_yaml holds no run"),
    ("data wikitext2 --chek", "--chek"),
    ("data synthetic dataset.train_tokens=-1", "dataset.train_tokens=-1: it must be at least 1"),
    ("data synthetic --config-dir nowhere", "nowhere: no such folder"),
    (
        "train dataset=synthetic dataset.train_tokens=9",
        "trainer.global_batch=20 leaves no two tokens a row in the 9 train tokens",
    ),
    ("train run_dir=theirs", "run_dir=theirs holds config.yaml, which a run would overwrite"),
    ("train -m optimizer.lr=interval(0.1,1)", "only a search can choose: hydra/sweeper=shardlab_optuna would"),
    ("train -m seed=1,2 sweep.parallel=1,2", "sweep.parallel is one for the whole sweep; give it one value"),
    ("train -m seed=1,2 sweep.objective=train/loss,val/loss", "several objectives are a list: 'sweep.objective=[val"),
    ("train -m seed=1,2 sweep.parallel=0", "sweep.parallel=0: it must be at least 1"),
    ("train -m seed=1,2 sweep.parallel=999", "sweep.parallel=999: each job needs a core of its own"),
    ("train -m seed=1,2 sweep.objective=val/los", "unknown sweep.objective=val/los; did you mean 'val/loss'?"),
    ("train -m seed=1,2 hydra.sweep.dir=torn", "hydra.sweep.dir=torn holds a run; give another folder"),
    ("train -m seed=1,2 hydra.sweep.dir=swept", "hydra.sweep.dir=swept holds another program's sweep"),
    ("train -m seed=1,2 hydra.sweep.dir=swept_too", "swept_too already holds another sweep; give another folder"),
]

AS_A_PROCESS = 10
"""Every so many cases are real commands; the others call main() here, which takes a tenth of the time."""


@pytest.fixture(autouse=True)
def _user_folders(tmp_path: Path) -> None:
    for name, text in {
        "shadowing/model/small.yaml": "name: small\n",
        "broken/model/broken.yaml": "name: x\n  d_model: [1\n",
        "broken/model/typo.yaml": "name: typo\nd_modle: 3\n",
        "broken/model/words.yaml": "just words\n",
        "broken/model/part.yaml": "name: part\nn_layers: 1\nd_model: 8\nn_heads: 1\n",
        "broken/experiment/typo2.yaml": "# @package _global_\ntrainer:\n  stepz: 3\n",
        "broken_yaml/provenance.json": '{"id": "a", "name": "b", "started": 1.0}',
        "broken_yaml/config.yaml": "a: [1",
        "torn/provenance.json": '{"id": "a',
        "torn/config.yaml": "seed: 1",
        "not_ours/provenance.json": '{"builder": "somebody"}',
        "not_ours/config.yaml": "seed: 1",
        "theirs/config.yaml": "mine: true",
        "swept/multirun.yaml": "hydra: {}",
        "swept_too/sweep.json": '{"id": "x", "space": ["seed=7,8"]}',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "latin/model/latin.yaml").parent.mkdir(parents=True)
    (tmp_path / "latin/model/latin.yaml").write_bytes(b"name: caf\xe9\n")


def files() -> set[str]:
    return {str(path) for path in Path().rglob("*")}


def assert_refused(status: int, error: str, said: str, before: set[str]) -> None:
    assert status == 2, error
    assert len(error.splitlines()) == 1, error
    assert said in error
    assert files() == before, "something was left behind"


@pytest.mark.parametrize(("words", "said"), [case for n, case in enumerate(WRONG) if n % AS_A_PROCESS])
def test_wrong_input_is_one_line(words, said, capfd):
    before = files()
    status = main(words.split())
    assert_refused(status, capfd.readouterr().err, said, before)


@pytest.mark.parametrize(("words", "said"), WRONG[::AS_A_PROCESS])
def test_wrong_input_is_one_line_of_the_real_command(words, said, shardlab):
    before, begun = files(), time.monotonic()
    ended = shardlab(*words.split())
    assert_refused(ended.returncode, ended.stderr, said, before)
    assert ended.stdout == ""
    # Alone it takes 0.3 to 0.7 s; the suite's other processes may share the machine.
    assert time.monotonic() - begun < 3 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def test_cuda_without_a_gpu_is_refused(capfd, monkeypatch):
    monkeypatch.setattr("shardlab.config.check.gpu_names", lambda: ("0",))
    assert main(["train", "runtime.device=cuda", "strategy=ddp", "ranks=2"]) == 2
    error = capfd.readouterr().err
    assert "runtime.device=cuda needs a GPU for each of 2 ranks, and 1 can be used here" in error
    assert len(error.splitlines()) == 1
