"""Training steps that are drawn, run for real on the machine at hand, and predicted: what `evaluate here` needs."""
