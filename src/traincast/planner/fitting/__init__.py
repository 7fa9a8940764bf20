"""Whether a step fits in memory: what would make it fit, and the largest that does."""
