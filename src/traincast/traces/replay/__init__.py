"""Traces replayed, predicted and turned into workloads."""
