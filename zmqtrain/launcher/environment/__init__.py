"""Hosts that join by themselves: a scheduler starts their agents, and the environment says which host each one is."""
