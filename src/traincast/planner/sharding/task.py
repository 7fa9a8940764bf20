"""What is to be placed, and on what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from traincast.hardware.device import Device
from traincast.hardware.platform import Platform
from traincast.hardware.topology import Topology
from traincast.models.embeddings.table import Table, check_tables
from traincast.models.placement.memory import MemoryLimits, check_sizes
from traincast.models.sharded_dlrm.step import AnyDense
from traincast.simulator.memory.device_memory import compute_headroom
from traincast.utils.errors import TraincastError

MAX_GPUS = 1024
"""The most GPUs that are searched for: time and memory of a full walk grow with their square."""
MAX_BATCH = 1 << 20
"""The largest batch of a GPU: far above any in use, so a larger one is a mistake."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Tables to be placed on `gpus` GPUs of a platform, for `batch_size` samples per GPU.

    `dense` is what every GPU computes besides (None: the step is that of the tables alone).
    """

    tables: tuple[Table, ...]
    platform: Platform
    gpus: int
    batch_size: int
    dense: AnyDense | None = None
    limits: MemoryLimits

    @property
    def device(self) -> Device:
        """One GPU, while the others work too."""
        return self.platform.get_device_when_sharing(self.gpus)

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a node that take part."""
        return min(self.platform.gpus_per_node, self.gpus)

    @property
    def nodes(self) -> int:
        """Nodes that take part."""
        return -(-self.gpus // self.gpus_per_node)

    @property
    def topology(self) -> Topology:
        """The links between the GPUs; a platform that says nothing of them is rejected."""
        if self.platform.topology is None:
            raise TraincastError(
                f"'{self.platform.key}' says nothing of the links between its GPUs; name a node such as dgx-a100"
            )
        return self.platform.topology


def make_task(
    tables: Sequence[Table], platform: Platform, *, gpus: int, batch_size: int, dense: AnyDense | None = None
) -> Task:
    """A task, checked: bad tables, sizes and numbers of GPUs are rejected by name."""
    if not 1 <= gpus <= MAX_GPUS:
        raise TraincastError(f"`gpus={gpus}`; give an integer from 1 to {MAX_GPUS}")
    if not 1 <= batch_size <= MAX_BATCH:
        raise TraincastError(f"`batch_size={batch_size}`; give samples per GPU, from 1 to {MAX_BATCH}")
    if gpus > platform.gpus_per_node and gpus % platform.gpus_per_node:
        raise TraincastError(
            f"`gpus={gpus}` does not fill nodes of {platform.gpus_per_node} GPUs; give a multiple of "
            f"{platform.gpus_per_node}, or fewer than that"
        )
    checked = check_tables(tables)
    for table in checked:
        if table.optimizer == "none":
            raise TraincastError(
                f"table '{table.name}' has optimizer 'none'; plans are made for training steps: give sgd, adagrad, "
                "rowwise_adagrad or adam"
            )
    held = dense.compute_memory_bytes(sum(table.dim for table in checked), batch_size) if dense else 0.0
    device = platform.device
    headroom = compute_headroom(device, communicators=1)
    limits = MemoryLimits(device=device.memory_bytes, headroom=headroom, dense=held)
    check_sizes(checked, limits, gpus)
    return Task(tables=checked, platform=platform, gpus=gpus, batch_size=batch_size, dense=dense, limits=limits)
