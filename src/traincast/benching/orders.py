"""The files in the folder that launched ranks share."""

from __future__ import annotations

JOBS = "jobs.json"
"""What ranks are to do, one job after the other."""
RESULTS = "results.jsonl"
"""What the first rank writes there, a line a job."""
LAUNCHER = "TRAINCAST_LAUNCHER"
"""The environment variable with the process that launched a rank."""
