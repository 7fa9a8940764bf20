"""What is promised to whoever gives us something odd: one file per promise."""
