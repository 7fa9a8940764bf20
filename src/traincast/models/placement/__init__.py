"""Where embedding tables go: plans, files of plans, what they need in memory, greedy plans."""

from traincast.models.placement.plan import ComputeKernel, Placement, Plan, Shard, ShardingKind, check_plan

__all__ = ["ComputeKernel", "Placement", "Plan", "Shard", "ShardingKind", "check_plan"]
