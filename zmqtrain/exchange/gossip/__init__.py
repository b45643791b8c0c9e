"""Gossip: each step every peer sends to one partner and receives from one, and there is no server."""
