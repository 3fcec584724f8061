"""The YAML groups, as a package: so Hydra finds them wherever shardlab is installed."""
