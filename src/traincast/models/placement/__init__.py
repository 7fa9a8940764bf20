"""Where embedding tables go: plans, files of plans, what they need in memory, greedy plans."""

from traincast.models.placement.kinds import ComputeKernel, ShardingKind
from traincast.models.placement.plan import Placement, Plan, Shard, check_plan

__all__ = ["ComputeKernel", "Placement", "Plan", "Shard", "ShardingKind", "check_plan"]
