"""What number of groups, momentum and learning rate reach the target soonest: pure decisions, no runs."""
