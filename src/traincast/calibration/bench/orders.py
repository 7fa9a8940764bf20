"""The files in the folder that launched ranks share."""

from __future__ import annotations

JOBS = "jobs.json"
"""What ranks are to do, one job after the other."""
RESULTS = "results.jsonl"
"""What the first rank writes there, a line a job."""
MEETING = "meeting"
"""Where ranks find each other: a file, since a port that was free may be taken by the time they listen on it."""
LAUNCHER = "TRAINCAST_LAUNCHER"
"""The environment variable with the process that launched a rank."""
