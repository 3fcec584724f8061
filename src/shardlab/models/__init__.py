"""The model: its shape, its parameter table, and the Transformer built from it."""
