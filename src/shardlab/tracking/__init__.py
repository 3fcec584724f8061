"""The run record, where it came from, and its way to MLflow."""
