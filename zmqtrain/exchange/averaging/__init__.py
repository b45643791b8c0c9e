"""Groups train alone and come together every few steps: local SGD, elastic averaging, and outer optimizers."""
