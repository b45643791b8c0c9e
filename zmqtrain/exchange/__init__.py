"""How a group's replica stays in touch with the others."""
