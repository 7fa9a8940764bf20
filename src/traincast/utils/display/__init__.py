"""Plain text and HTML out of rows: pure functions without knowledge of what they show."""
