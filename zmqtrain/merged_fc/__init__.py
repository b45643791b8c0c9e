"""The fully connected layers merged on an FC server: its messages, both its sides, and the model in two phases."""
