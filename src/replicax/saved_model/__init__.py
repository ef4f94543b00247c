"""Export of functions with their variables."""
