"""Groups train alone and combine their models every few steps: local SGD, elastic averaging, and outer optimizers."""
