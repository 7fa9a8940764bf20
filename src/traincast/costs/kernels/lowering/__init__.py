"""Ops without a kernel family of their own: those that launch nothing, synchronise, or are not known."""
