"""Device memory of a step: the caching allocator replayed, what processes hold besides, and whether it fits."""
