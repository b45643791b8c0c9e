"""The accumulator of one host: reduction in shared memory."""
