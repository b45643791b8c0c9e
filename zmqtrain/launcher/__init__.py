"""Turns a placement into running processes and supervises them."""
