"""The zmqtrain command and what a person sees of it."""
