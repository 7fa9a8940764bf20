"""Edits of the ops of a step: pure functions from a workload to another."""
