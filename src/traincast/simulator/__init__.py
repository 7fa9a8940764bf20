"""The simulation: schedules, host threads and device streams of all ranks, overlap, critical path."""
