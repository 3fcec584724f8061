"""Joining a job that torchrun or Slurm has started: one launcher leads, the others follow and start one rank each."""
