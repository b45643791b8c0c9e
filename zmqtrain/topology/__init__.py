"""The topology file: schema, validation and placement. Sans-IO."""
