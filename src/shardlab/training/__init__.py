"""What happens inside a rank: the loop, the step, evaluation, the best model."""
