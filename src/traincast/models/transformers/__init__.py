"""Transformers as descriptions: a few numbers from which their training steps are written."""
