"""The fully connected layers, computed for all workers on an FC server: messages, both sides, and the model in two phases."""
