"""Ops that look rows up in embedding tables, update them, or prepare either."""
