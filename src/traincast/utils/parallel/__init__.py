"""Many independent tasks on the cores of this machine."""
