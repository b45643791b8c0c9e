"""Layers whose model is divided over the rows of a grid: each process has 1/Pr of the weights and 1/Pc of the batch."""
