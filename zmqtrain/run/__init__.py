"""What a run is made of in every world: its assembly, the agent of a host, how roles enter it, and how it ends and reports."""
