"""What if: edits of a step or its hardware, the change they make with its interval, advice, money, sweeps."""
