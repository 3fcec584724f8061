"""`hydra/sweeper=shardlab_optuna`: Optuna chooses the next job's values from what the jobs before it came to.

Hydra imports the modules here whose names have no underscore at the start of every command, so `sweeper.py` is light
and brings in the others, and with them Optuna, only for a sweep that chose it.
"""
