"""What a model and a machine can do, by trying: everything that planners and modelled devices otherwise have to be told."""
