"""The model server: a shard of the model and the optimizer that runs on it."""
