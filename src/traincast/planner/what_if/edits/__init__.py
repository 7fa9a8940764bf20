"""Edits: one small file a family, each a pure function from a step to another; `registry` finds them by name."""
