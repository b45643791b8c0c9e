"""Ordinary models become divided ones: what each layer is replaced by, and how activations pass between them."""
