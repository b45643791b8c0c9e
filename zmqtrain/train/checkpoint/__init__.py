"""Checkpoints and the run's model: how they are written, collected, and read again."""
