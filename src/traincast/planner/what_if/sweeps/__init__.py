"""Sweeps: many points of a step predicted side by side, into a table that survives interruption."""
