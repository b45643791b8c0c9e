"""The best shape for a job, and the reasons: cost models and the planner."""
