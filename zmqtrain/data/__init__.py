"""Which samples a worker takes at which step."""
