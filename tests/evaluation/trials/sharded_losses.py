"""Run by a test, once per rank: the losses of a tiny DLRM under every candidate sharding, printed as JSON."""

from __future__ import annotations

import json
import sys

import torch.distributed as dist

from tests.evaluation.trials.tiny import PLANS, TASK, losses
from traincast_evaluation.trials.dlrm import build_dlrm_step

if __name__ == "__main__":
    folder, rank = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    made = {name: losses(build_dlrm_step(TASK, plan)(6, rank=rank, world_size=2)) for name, plan in PLANS.items()}
    print(json.dumps(made))
    dist.destroy_process_group()
