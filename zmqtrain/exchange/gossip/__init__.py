"""Gossip: in each step every peer sends to one partner and receives from one; there is no server."""
