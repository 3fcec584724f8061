"""Hydra finds the launcher here when shardlab is installed: hydra/launcher=shardlab."""
