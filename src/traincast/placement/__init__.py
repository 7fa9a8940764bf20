"""Where embedding tables go: plans, files of plans, what they need in memory, greedy plans."""

from traincast.placement.plan import KERNELS, KINDS, Placement, Plan, Shard, check_plan

__all__ = ["KERNELS", "KINDS", "Placement", "Plan", "Shard", "check_plan"]
