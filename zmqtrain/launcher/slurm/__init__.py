"""Hosts as nodes of a Slurm job: agents are steps of it, and end with the launcher."""
