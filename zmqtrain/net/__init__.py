"""Endpoints: one process's place on the network, over ZeroMQ or in memory."""
