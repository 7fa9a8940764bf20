"""The built-in models as data, and the PyTorch definitions they were captured from."""
