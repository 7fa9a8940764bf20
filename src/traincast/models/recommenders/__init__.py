"""Recommenders other than DLRMs, described in YAML and written without torch."""
