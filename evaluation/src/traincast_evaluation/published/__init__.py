"""Training programs that others have published, rank by rank as their code runs them; `catalog` has them by name."""
