"""Bytes: message headers, tensor frames, compression and limits. Sans-IO."""
