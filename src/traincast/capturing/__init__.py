"""PyTorch to `Workload`, with no GPU: one iteration run on meta tensors, as CUDA would run it."""

from traincast.capturing.torch_version import check_torch

check_torch()  # first: the modules below name parts of PyTorch that other versions may lack

from traincast.capturing.distributed import capture_distributed  # noqa: E402
from traincast.capturing.from_file import capture_function, load_function  # noqa: E402
from traincast.capturing.script import capture_script, record, recording  # noqa: E402
from traincast.capturing.step import capture_step  # noqa: E402

__all__ = [
    "capture_distributed", "capture_function", "capture_script", "capture_step", "load_function", "record", "recording",
]  # fmt: skip
