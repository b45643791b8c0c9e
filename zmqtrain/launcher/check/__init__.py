"""What could prevent a launch: findings about the file, its task and the hosts."""
