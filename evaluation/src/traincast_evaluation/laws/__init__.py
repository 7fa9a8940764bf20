"""Metamorphic laws: what every answer is, and how answers to changed questions relate, whatever the numbers are."""
