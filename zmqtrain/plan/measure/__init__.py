"""Measurements of a model and a machine, for planners and modelled devices."""
