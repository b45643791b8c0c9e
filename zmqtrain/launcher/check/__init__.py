"""What stands in the way of a launch: findings about the file, its task and the hosts."""
