"""Train a PyTorch model on a few machines over an ordinary network."""
