"""A run as a Kubernetes JobSet."""
