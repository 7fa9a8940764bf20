"""Module definitions of the built-in models (torch only). Used to capture them, never to predict."""
