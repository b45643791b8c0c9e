"""One page about a run: what its directory holds, folded into figures, and drawn."""
