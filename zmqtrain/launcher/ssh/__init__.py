"""Hosts as machines that one logs in to: agents are started over ssh, and live on without it."""
