"""Quantiles that intervals are made with."""

from __future__ import annotations

Z90 = 1.645
"""Standard normal quantile of a two-sided 90 % interval: 5 % of a normal distribution are above it."""
