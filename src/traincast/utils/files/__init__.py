"""Small files of strangers read within limits, and files written whole or not at all."""
