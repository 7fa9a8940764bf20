"""One step of a workload on a platform: the answer and what it is made of."""
