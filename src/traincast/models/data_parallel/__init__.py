"""From the step of one GPU to the steps of many: as `DistributedDataParallel`, ZeRO and FSDP run them."""

from traincast.models.data_parallel.data_parallel import data_parallel, on_gpus, with_ddp
from traincast.models.data_parallel.fully_sharded import Sharding, share_step

__all__ = ["Sharding", "data_parallel", "on_gpus", "share_step", "with_ddp"]
