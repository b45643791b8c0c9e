"""Exchanges: how the replicas of different groups agree on parameters."""
