"""From the step of one GPU to the steps of many, as `DistributedDataParallel` runs them."""

from traincast.models.data_parallel.data_parallel import data_parallel, on_gpus, with_ddp

__all__ = ["data_parallel", "on_gpus", "with_ddp"]
