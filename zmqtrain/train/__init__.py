"""A worker's life: task, replica, step, device, checkpoint."""
