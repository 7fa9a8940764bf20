"""The search for the placement of embedding tables with the fastest step."""
