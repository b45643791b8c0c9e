"""Hosts that a Ray cluster provides. Needs the ``[ray]`` extra."""
