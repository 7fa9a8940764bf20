"""From the step of one GPU to the steps of many: as `DistributedDataParallel`, ZeRO and FSDP run them."""

from traincast.models.data_parallel.data_parallel import add_ddp, apply_data_parallel, replicate_on_gpus
from traincast.models.data_parallel.fully_sharded import Sharding, share_step

__all__ = ["Sharding", "add_ddp", "apply_data_parallel", "replicate_on_gpus", "share_step"]
