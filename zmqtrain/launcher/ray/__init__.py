"""Hosts that a Ray cluster gives. Needs the ``[ray]`` extra."""
