"""A recommender whose tables are sharded over many ranks."""
