"""Answers as pages: one self-contained HTML file each, with a timeline to zoom and charts to read."""
