"""Hosts as nodes of a Slurm job: agents are steps of it, and live no longer than whoever launches."""
