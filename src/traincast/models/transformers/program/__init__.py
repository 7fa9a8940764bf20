"""Steps of Transformers written without torch, from a description: layers, heads, and whole steps of one GPU."""
