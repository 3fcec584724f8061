"""The parent side of a run: its folder, its ranks, signals, progress, and how it ended."""
