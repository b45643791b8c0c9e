"""Runs that a program starts and follows: `zmqtrain.launch`."""
