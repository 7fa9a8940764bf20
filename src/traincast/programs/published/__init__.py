"""Training programs that others published measurements of, as their code runs them."""
