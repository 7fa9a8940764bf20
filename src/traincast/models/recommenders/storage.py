"""Where the rows of a described table are, and the lookups of tables that are not simply on the device: unified memory,
with or without a cache; dynamic hash tables; a drive behind a cache; tables that leave the device between the forward
and the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from traincast.ir.ops import ACCUMULATE_GRAD, Phase, StorageKind
from traincast.models.embeddings.table import (
    OPTIMIZER_STATE,
    STATE_ITEM_BYTES,
    Part,
    Table,
    count_fetched_rows,
)
from traincast.models.layers.builder import Ref, Scalars, StepBuilder
from traincast.models.layers.optimizers import TableBatchedLookup
from traincast.models.placement.plan import ComputeKernel
from traincast.utils.errors import TraincastError, make_unknown_error, shorten_value

_KINDS = {
    "device": 1.0, "uvm": 0.0, "uvm_caching": 0.2, "hash": 1.0, "ssd": 0.2, "stashed": 1.0,
}  # fmt: skip
"""What there is, and the share of the rows on the device where nobody says it: FBGEMM's 0.2 for caches."""
_STASH = 17  # the stream on which stashed tables leave and come back
_LARGEST_RATE = 1000.0  # GB/s of a drive: a limit against other units


@dataclass(frozen=True, slots=True)
class Storage:
    """`cache`: share of the rows on the device; `hit_rate`: share of a batch's different rows that are found there
    (None: as the table's access says); `drive_gb_per_s`: what the drive of `ssd` reads and writes."""

    kind: str = "device"
    cache: float = 1.0
    hit_rate: float | None = None
    drive_gb_per_s: float = 0.0

    @property
    def kernel(self) -> ComputeKernel | None:
        """The kernel of a plan that keeps rows like this; None where plans have none."""
        kernels = {"device": ComputeKernel.FUSED, "uvm": ComputeKernel.FUSED_UVM,
                   "uvm_caching": ComputeKernel.FUSED_UVM_CACHING}  # fmt: skip
        return None if self.hit_rate is not None else kernels.get(self.kind)

    def count_fetched_rows(self, table: Table, bags: int) -> float:
        """Rows of a batch that the device has to be brought."""
        if self.hit_rate is not None:
            return (1.0 - self.hit_rate) * table.count_unique_rows(bags)
        if self.kind == "hash":  # a row's place follows from its key, not from how often it is wanted
            return (1.0 - self.cache) * table.count_unique_rows(bags)
        return count_fetched_rows(Part(table, table.dim), bags, self.cache)


DEVICE = Storage()


def read_storage(value: Any, label: str) -> Storage:
    """A kind by name, or a mapping with `kind` and numbers."""
    content: Any = {"kind": value} if isinstance(value, str) else value
    names = [field.name for field in fields(Storage)]
    if not isinstance(content, Mapping) or "kind" not in content or set(content) - set(names):
        raise TraincastError(
            f"{label}: storage {shorten_value(value)}; give a kind, or a mapping of {', '.join(names)}"
        )
    kind = content["kind"]
    if kind not in _KINDS:
        raise make_unknown_error("storage", str(kind), _KINDS, f"{label}: choose {', '.join(_KINDS)}.")
    cached = kind in ("uvm_caching", "hash", "ssd")
    limits = {"cache": 1.0, "hit_rate": 1.0, "drive_gb_per_s": _LARGEST_RATE}
    for name, most in limits.items():
        if name not in content:
            continue
        number = content[name]
        if type(number) not in (int, float) or not 0 <= number <= most or (name != "hit_rate" and not number):
            raise TraincastError(f"{label}: {name} {shorten_value(number)}; give a number up to {most:g}")
        if not (kind == "ssd" if name == "drive_gb_per_s" else cached):
            raise TraincastError(f"{label}: a table kept as '{kind}' has no {name}; leave it out")
    if kind == "ssd" and "drive_gb_per_s" not in content:
        raise TraincastError(f"{label}: say how fast its drive is: drive_gb_per_s")
    return Storage(**{"cache": _KINDS[kind], **content})


Update = Callable[[Ref], None]
"""Writes the update of tables from the gradient of what was looked up."""


def write_lookup(
    builder: StepBuilder, storage: Storage, tables: tuple[Table, ...], forms: Scalars, bags: int, module: str
) -> tuple[Ref, Update, list[Callable[[], None]]]:
    """Rows [bags, columns] of tables that are kept alike, how they are updated, and what runs when backward begins.
    `forms` are the scalars of FBGEMM's kernels."""
    lookups = round(sum(table.pooling.mean for table in tables) * bags)
    indices = builder.add_resident_tensor((lookups,), StorageKind.INPUT, "int64")
    if storage.kind == "hash":
        return *_write_hash_lookup(builder, storage, tables, bags, indices, module), []
    host = storage.kind in ("uvm", "uvm_caching", "ssd")
    place = "cpu:pinned" if host else "cuda"
    state = OPTIMIZER_STATE[tables[0].optimizer]
    held = sum(table.rows * state.count_state_per_row(table.dim) for table in tables) // max(1, state.tensors)
    kernel = TableBatchedLookup(
        builder=builder, tables=len(tables), optimizer=tables[0].optimizer, module=module,
        forms=[*forms, ("host", 2 if storage.kind in ("uvm_caching", "ssd") else 1)] if host else forms,
        weights=builder.add_resident_tensor((_count_elements(tables),), StorageKind.PARAMETER, device=place),
        states=[
            builder.add_resident_tensor((held,), StorageKind.BUFFER, device="cuda" if state.per_row else place)
            for _ in range(state.tensors)
        ],
    )  # fmt: skip
    offsets = builder.add_resident_tensor((len(tables) * bags + 1,), StorageKind.INPUT, "int64")
    kernel.write_bounds_check(indices, offsets)
    if storage.kind in ("uvm_caching", "ssd"):
        _write_fill(builder, kernel, storage, tables, bags)
    pooled = kernel.write_forward(bags, sum(table.dim for table in tables))
    stash = _Stash(builder, kernel) if storage.kind == "stashed" else None

    def update(grad: Ref) -> None:
        if stash is not None:
            stash.wait()
        kernel.write_backward(grad)
        builder.open_scope(ACCUMULATE_GRAD)

    return pooled, update, [] if stash is None else [stash.restore]


def _count_elements(tables: tuple[Table, ...]) -> int:
    return sum(table.rows * table.dim for table in tables)


def _write_fill(
    builder: StepBuilder, kernel: TableBatchedLookup, storage: Storage, tables: tuple[Table, ...], bags: int
) -> None:
    """What the cache lacks comes from the host or from a drive."""
    cache = builder.add_resident_tensor((round(storage.cache * _count_elements(tables)),), StorageKind.PARAMETER)
    rows = {table: storage.count_fetched_rows(table, bags) for table in tables}
    scalars: Scalars = [
        ("fetched_rows", round(sum(rows.values()))),
        ("fetched_bytes", round(sum(count * table.row_bytes for table, count in rows.items()))),
        ("unique_rows", round(sum(table.count_unique_rows(bags) for table in tables))),
        ("total_rows", sum(table.rows for table in tables)),
    ]
    if storage.kind == "ssd":
        drive: Scalars = [*scalars, ("drive_bytes_per_s", round(1e9 * storage.drive_gb_per_s))]
        kernel.write_cache_fill(cache, drive, "traincast::drive_cache_populate")
    else:
        kernel.write_cache_fill(cache, scalars)


class _Stash:
    """Weights leave for pinned host memory behind the lookup, and come back from where backward begins."""

    def __init__(self, builder: StepBuilder, kernel: TableBatchedLookup) -> None:
        self.builder, self.kernel, self.event = builder, kernel, -1
        builder.open_scope("EmbeddingStash.stash", Phase.FORWARD)
        builder.wait_for_event(builder.record_event(0), _STASH)
        with builder.use_stream(_STASH):
            self.stashed = builder.add_device_copy(kernel.weights, "cpu:pinned", non_blocking=True)
        builder.free_tensors(kernel.weights)

    def restore(self) -> None:
        """Starts the way back."""
        builder = self.builder
        builder.open_scope("EmbeddingStash.restore", Phase.BACKWARD)
        builder.wait_for_event(builder.record_event(0), _STASH)
        with builder.use_stream(_STASH):
            self.kernel.weights = builder.add_device_copy(self.stashed, non_blocking=True)
        builder.target.set_kind(self.kernel.weights.storage, StorageKind.PARAMETER)
        self.event = builder.record_event(_STASH)

    def wait(self) -> None:
        """The update waits for the weights."""
        self.builder.open_scope("EmbeddingStash.wait", Phase.BACKWARD)
        self.builder.wait_for_event(self.event)


def _write_hash_lookup(
    builder: StepBuilder, storage: Storage, tables: tuple[Table, ...], bags: int, keys: Ref, module: str
) -> tuple[Ref, Update]:
    """Tables of one width in one dynamic hash table, rows and their optimizer's state side by side."""
    dim, state = tables[0].dim, OPTIMIZER_STATE[tables[0].optimizer]
    here = max(1, round(storage.cache * sum(table.rows for table in tables)))
    resident, width = builder.add_resident_tensor, state.count_state_per_row(dim)
    values, slots = resident((here, dim), StorageKind.PARAMETER), resident((here,), StorageKind.BUFFER, "int64")
    states = [resident((here, width), StorageKind.BUFFER)] if width else []
    on_host = sum(storage.count_fetched_rows(table, bags) for table in tables)
    scalars: Scalars = [
        ("unique_rows", round(sum(table.count_unique_rows(bags) for table in tables))), ("host_rows", round(on_host)),
        ("dim", dim), ("state_bytes", STATE_ITEM_BYTES * width),
    ]  # fmt: skip
    builder.open_scope("DynamicEmb.lookup", Phase.FORWARD)
    pooled = builder.add_tensor((bags, dim * len(tables)))
    held = [("keys", keys), ("values", values), ("slots", slots)]
    op = builder.add_op("dynamicemb::lookup", held, [pooled], scalars, module=module)

    def update(grad: Ref) -> None:
        builder.open_scope("DynamicEmbBackward", Phase.BACKWARD)
        arguments = [("grad_output", grad), *held, *(("states", state) for state in states)]
        builder.add_op("dynamicemb::update", arguments, [], scalars, module=module, forward=op)

    return pooled, update
