"""A page in the browser about the runs of a folder, while they train and after: what their directories give, and nothing else."""
