"""What Hydra knows of the sweeper: its keys, and the class that it calls."""

from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from shardlab.errors import ShardlabError


@dataclass
class OptunaConf:
    """The keys under hydra.sweeper.

    n_trials: completed and pruned trials that the study is to have in the end, those of earlier commands included
    sampler: who proposes the values: tpe, random or gp; seed: of its proposals; null takes the config's own
    pruner: whether hopeless trials are ended early: none, median or halving
    storage: the database, as SQLAlchemy writes it; null is study.db in the sweep's folder
    study: the study's name in there; null is derived from the folder's
    """

    _target_: str = "hydra_plugins.shardlab_optuna.sweeper.ShardlabOptuna"
    n_trials: int = 20
    sampler: str = "tpe"
    seed: int | None = None
    pruner: str = "none"
    storage: str | None = None
    study: str | None = None


ConfigStore.instance().store(group="hydra/sweeper", name="shardlab_optuna", node=OptunaConf, provider="shardlab")


class ShardlabOptuna(Sweeper):
    """Hydra's side of a search: the arguments are OptunaConf's keys."""

    def __init__(self, **keys: Any) -> None:
        self.keys = OptunaConf(**keys)
        self.config: DictConfig | None = None
        self.launcher: Launcher | None = None
        self.hydra_context: HydraContext | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """See Hydra's Sweeper."""
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Search. arguments: the overrides of the command line, without Hydra's own.

        Raises ShardlabError before the first job for what the user can mend.
        """
        try:
            import optuna
        except ModuleNotFoundError as error:
            if error.name != "optuna":
                raise
            raise ShardlabError("hydra/sweeper=shardlab_optuna needs optuna: pip install 'shardlab[optuna]'") from None
        if int(optuna.__version__.split(".")[0]) < 4:
            raise ShardlabError(
                f"hydra/sweeper=shardlab_optuna needs optuna 4 or newer, not {optuna.__version__}: "
                "pip install 'shardlab[optuna]'"
            )
        from hydra_plugins.shardlab_optuna._sweep import sweep

        assert self.config is not None
        assert self.launcher is not None
        assert self.hydra_context is not None
        sweep(self.keys, arguments, self.config, self.hydra_context.config_loader, self.launcher)
