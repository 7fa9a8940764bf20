"""Lowering: an op of a program becomes the kernel launches and synchronisations that PyTorch makes of it."""
