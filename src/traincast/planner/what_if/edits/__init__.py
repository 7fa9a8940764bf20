"""Edits: one small file a family, each a pure function from a scene to another; `registry` finds them by name."""
