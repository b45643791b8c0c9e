"""Training from a program of your own: sessions, and worlds without a launcher."""
