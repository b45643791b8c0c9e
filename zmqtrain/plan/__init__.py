"""What shape should this job have, and why: cost models and the planner."""
