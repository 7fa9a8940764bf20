"""Types of numbers in a step of ops: as autocast would choose them, or with weights in 16 bits."""
