"""Making the data files of the built-in models by capture (torch only)."""
