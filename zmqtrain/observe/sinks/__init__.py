"""Where a run's figures go besides its directory: TensorBoard, Prometheus, MLflow, Weights & Biases, a CSV file, or a plug-in."""
