"""Hosts as machines to log in to: agents are started over ssh, and continue without the connection."""
