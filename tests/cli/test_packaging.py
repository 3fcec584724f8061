"""A wheel and an editable install both work from another folder, with the packaged configs and experiments.

Built without the network: the environments see this one's packages, except for shardlab itself.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
NEEDED = ["setup.cfg", "pyproject.toml", "LICENSE", "README.md", "conf", "experiments", "src"]


def call(*command: str | Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ended = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env=environment, timeout=180, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean copy, as a clone is: links kept, nothing built, and a result folder that must stay out."""
    copy = tmp_path_factory.mktemp("clone") / "shardlab"
    copy.mkdir()
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in NEEDED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=skip)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name)
    (copy / "experiments" / "demo").mkdir(exist_ok=True)
    (copy / "experiments" / "demo" / "result.yaml").write_text("a: 1\n")
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    call(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source)
    return next(folder.glob("*.whl"))


def environment(folder: Path) -> Path:
    """A fresh environment that sees this one's packages; returns its python."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # A plain path in a .pth is searched last and runs none of the .pth files in there: shardlab's own is not seen.
    Path(site, "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_wheel_holds_configs_and_no_results(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    expected = {f"shardlab/conf/{path.relative_to(ROOT / 'conf')}" for path in (ROOT / "conf").glob("*/*.yaml")}
    expected |= {f"shardlab/conf/experiment/{path.name}" for path in (ROOT / "experiments").glob("*.yaml")}
    assert expected | {"shardlab/conf/config.yaml"} == {name for name in names if name.endswith(".yaml")}
    assert any(name.endswith("LICENSE") for name in names)


def test_wheel_holds_every_module_and_leaves_the_plugins_namespace_open(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").glob("*/**/*.py")}
    modules.add("shardlab/conf/__init__.py")  # behind a link, which glob does not follow
    assert modules == {name for name in names if name.endswith(".py")}
    assert "hydra_plugins/shardlab_optuna/sweeper.py" in names
    assert "hydra_plugins/__init__.py" not in names  # it would hide the other plugins of Hydra
    assert not [name for name in names if "__pycache__" in name]


@pytest.mark.parametrize("editable", [False, True], ids=["wheel", "editable"])
def test_install_works_from_another_folder(editable, source, wheel, tmp_path):
    python = environment(tmp_path / "env")
    what = ["--editable", source] if editable else [wheel]
    call(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", *what)
    home = str(source if editable else tmp_path / "env")
    assert call(python, "-c", "import shardlab; print(shardlab.__file__)").startswith(home)
    command = tmp_path / "env" / "bin" / "shardlab"
    assert "n_layers: 8" in call(command, "train", "model=small", "--cfg", "job")
    assert "lr: 5.0" in call(command, "train", "experiment=tutorial_small", "--cfg", "job")
    assert "n_trials: 20" in call(command, "train", "hydra/sweeper=shardlab_optuna", "--cfg", "hydra")
    if editable:  # of the same code: the wheel's training is enough
        return
    short = ["trainer.steps=1", "trainer.eval_batches=1", "trainer.test=false", "tracking=none"]
    call(command, "train", "experiment=demo", "strategy=ddp", "run_dir=run", *short)
    assert (tmp_path / "run" / "events.jsonl").is_file()
