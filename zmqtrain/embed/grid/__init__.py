"""A script's model that its group divides over a grid: what sessions do about it."""
