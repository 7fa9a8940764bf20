"""One step of a workload on a platform: the result and what it is made of."""
