"""Hosts whose agents come by themselves: a scheduler has started them, and their environment says what they are."""
