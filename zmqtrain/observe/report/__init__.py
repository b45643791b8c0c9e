"""One page about a run: the contents of its directory, folded into figures and drawn."""
