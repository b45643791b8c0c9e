"""What a run is made of in every world."""
