"""Training steps of large Transformers on many GPUs, put together from the roles that ranks play."""
