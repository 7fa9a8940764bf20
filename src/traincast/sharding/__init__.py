"""Where embedding tables go: plans, what they need in memory, what they cost, and the search for the best one."""

from traincast.sharding.plan import KERNELS, KINDS, Placement, Plan, Shard, check_plan

__all__ = ["KERNELS", "KINDS", "Placement", "Plan", "Shard", "check_plan"]
