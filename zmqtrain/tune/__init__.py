"""Decides which number of groups, momentum and learning rate reach the target soonest. Pure decisions, no runs."""
