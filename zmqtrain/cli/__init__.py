"""The zmqtrain command and what it prints."""
