"""PyTorch to `Workload`, with no GPU: one iteration run on tensors without data, as CUDA would run it."""

from traincast.capturing.distributed import capture_distributed
from traincast.capturing.from_file import capture_function, load_function
from traincast.capturing.step import capture_step

__all__ = ["capture_distributed", "capture_function", "capture_step", "load_function"]
