"""Where a step's arithmetic happens: CPU, CUDA, or a model of either."""
