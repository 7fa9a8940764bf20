"""Small untrusted files read within limits, and files written whole or not at all."""
