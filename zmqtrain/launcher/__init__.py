"""Turns a placement into running processes and keeps watch over them."""
