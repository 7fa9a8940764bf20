"""Where the rows of a described table are, and the lookups of tables that are not simply on the device: unified memory,
with or without a cache; dynamic hash tables; a drive behind a cache; tables that leave the device between the forward
and the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
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
STASH_OUT, STASH_BACK, STASH_WAIT = (f"EmbeddingStash.{word}" for word in ("stash", "restore", "wait"))
HASH_LOOKUP = "DynamicEmb.lookup"
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

    def describe(self) -> dict[str, Any]:
        """What `read_storage` reads."""
        usual = Storage(self.kind, _KINDS[self.kind])
        said = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in said.items() if name == "kind" or value != getattr(usual, name)}

    @property
    def kernel(self) -> ComputeKernel:
        """The kernel of a plan that takes as much of the device: what is in it is told by the storage."""
        if self.kind == "uvm":
            return ComputeKernel.FUSED_UVM
        return ComputeKernel.FUSED_UVM_CACHING if self.cached else ComputeKernel.FUSED

    @property
    def cached(self) -> bool:
        """Whether the device holds a cache of rows that are elsewhere."""
        return self.kind in ("uvm_caching", "ssd")

    @property
    def missed(self) -> float | None:
        """Share of a batch's different rows that the device lacks; None where it follows from how often they are
        wanted."""
        if self.hit_rate is not None:
            return 1.0 - self.hit_rate
        return 1.0 - self.cache if self.kind == "hash" else None  # a row's place there follows from its key

    def count_fetched_rows(self, table: Table, bags: int) -> float:
        """Rows of a batch that the device has to be brought."""
        if self.missed is not None:
            return self.missed * table.count_unique_rows(bags)
        return count_fetched_rows(Part(table, table.dim), bags, self.cache)

    def list_fill_scalars(self, fetched: float, nbytes: float, distinct: int, rows: int) -> tuple[Scalars, str]:
        """What is said of filling the cache on the device, and the op that fills it."""
        scalars: Scalars = [
            ("fetched_rows", round(fetched)), ("fetched_bytes", round(nbytes)), ("unique_rows", distinct),
            ("total_rows", rows),
        ]  # fmt: skip
        if self.kind != "ssd":
            return scalars, "fbgemm::lru_cache_populate"
        drive: Scalars = [("drive_bytes_per_s", round(1e9 * self.drive_gb_per_s))]
        return [*scalars, *drive], "traincast::drive_cache_populate"


DEVICE = Storage()


def read_storage(value: Any, label: str) -> Storage:
    """A kind by name, or a mapping with `kind` and numbers."""
    content: Any = {"kind": value} if isinstance(value, str) else value
    names = [one.name for one in fields(Storage)]
    if not isinstance(content, Mapping) or "kind" not in content or set(content) - set(names):
        raise TraincastError(
            f"{label}: storage {shorten_value(value)}; give a kind, or a mapping of {', '.join(names)}"
        )
    kind = content["kind"]
    if not isinstance(kind, str) or kind not in _KINDS:
        raise make_unknown_error("storage", str(kind), _KINDS, f"{label}: choose {', '.join(_KINDS)}.")
    cached = kind in ("uvm_caching", "hash", "ssd")  # may hold a part of the rows
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
        rows, distinct = sum(table.rows for table in tables), sum(table.count_unique_rows(bags) for table in tables)
        hashed = HashTable(builder, storage, tables[0].dim, len(tables), rows, round(distinct), tables[0].optimizer)
        return hashed.write_lookup(indices, bags, forms, module), hashed.write_update, []
    host = storage.kind in ("uvm", "uvm_caching", "ssd")
    place = "cpu:pinned" if host else "cuda"
    state = OPTIMIZER_STATE[tables[0].optimizer]
    held = sum(table.rows * state.count_state_per_row(table.dim) for table in tables) // max(1, state.tensors)
    kernel = TableBatchedLookup(
        builder=builder, tables=len(tables), optimizer=tables[0].optimizer, module=module,
        forms=[*forms, ("host", 2 if storage.cached else 1)] if host else forms,
        weights=builder.add_resident_tensor((_count_elements(tables),), StorageKind.PARAMETER, device=place),
        states=[
            builder.add_resident_tensor((held,), StorageKind.BUFFER, device="cuda" if state.per_row else place)
            for _ in range(state.tensors)
        ],
    )  # fmt: skip
    offsets = builder.add_resident_tensor((len(tables) * bags + 1,), StorageKind.INPUT, "int64")
    kernel.write_bounds_check(indices, offsets)
    if storage.cached:
        _write_fill(builder, kernel, storage, tables, bags)
    pooled = kernel.write_forward(bags, sum(table.dim for table in tables))
    stash = Stash(builder, kernel) if storage.kind == "stashed" else None

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
    fetched = {table: storage.count_fetched_rows(table, bags) for table in tables}
    nbytes = sum(count * table.row_bytes for table, count in fetched.items())
    distinct = round(sum(table.count_unique_rows(bags) for table in tables))
    rows = sum(table.rows for table in tables)
    kernel.write_cache_fill(cache, *storage.list_fill_scalars(sum(fetched.values()), nbytes, distinct, rows))


class Stash:
    """Weights leave for pinned host memory behind the lookup, and come back from where backward begins."""

    def __init__(self, builder: StepBuilder, kernel: TableBatchedLookup) -> None:
        self.builder, self.kernel, self.event = builder, kernel, -1
        builder.open_scope(STASH_OUT, Phase.FORWARD)
        builder.wait_for_event(builder.record_event(0), _STASH)
        with builder.use_stream(_STASH):
            self.stashed = builder.add_device_copy(kernel.weights, "cpu:pinned", non_blocking=True)
        builder.free_tensors(kernel.weights)

    def restore(self) -> None:
        """Starts the way back."""
        builder = self.builder
        builder.open_scope(STASH_BACK, Phase.BACKWARD)
        builder.wait_for_event(builder.record_event(0), _STASH)
        with builder.use_stream(_STASH):
            self.kernel.weights = builder.add_device_copy(self.stashed, non_blocking=True)
        builder.target.set_kind(self.kernel.weights.storage, StorageKind.PARAMETER)
        self.event = builder.record_event(_STASH)

    def wait(self) -> None:
        """The update waits for the weights."""
        self.builder.open_scope(STASH_WAIT, Phase.BACKWARD)
        self.builder.wait_for_event(self.event)


@dataclass(slots=True)
class HashTable:
    """Tables of one width in one dynamic hash table, rows and their optimizer's state side by side. A batch wants
    `distinct` of its `rows`."""

    builder: StepBuilder
    storage: Storage
    dim: int
    tables: int
    rows: int
    distinct: int
    optimizer: str
    weights: Ref = field(init=False)
    indices: Ref = field(init=False)
    _held: list[tuple[str, Ref]] = field(init=False)
    _states: list[tuple[str, Ref]] = field(init=False)
    _scalars: Scalars = field(init=False)
    _op: int = field(init=False, default=-1)
    _module: str = field(init=False, default="")

    def __post_init__(self) -> None:
        resident, width = (
            self.builder.add_resident_tensor,
            OPTIMIZER_STATE[self.optimizer].count_state_per_row(self.dim),
        )
        here = max(1, round(self.storage.cache * self.rows))
        self.weights = resident((here, self.dim), StorageKind.PARAMETER)
        self._held = [("dev_weights", self.weights), ("slots", resident((here,), StorageKind.BUFFER, "int64"))]
        self._states = [("momentum1_dev", resident((here, width), StorageKind.BUFFER))] if width else []
        self._scalars = [
            ("unique_rows", self.distinct), ("host_rows", round((self.storage.missed or 0.0) * self.distinct)),
            ("dim", self.dim), ("state_bytes", STATE_ITEM_BYTES * width), ("optimizer", self.optimizer),
        ]  # fmt: skip

    def write_lookup(self, indices: Ref, bags: int, forms: Scalars, module: str) -> Ref:
        """Rows [bags, columns] of what is looked up."""
        self.indices = indices
        self._held.insert(0, ("indices", indices))
        self._scalars, self._module = [*self._scalars, *forms], module
        self.builder.open_scope(HASH_LOOKUP, Phase.FORWARD)
        pooled = self.builder.add_tensor((bags, self.dim * self.tables))
        self._op = self.builder.add_op("dynamicemb::lookup", self._held, [pooled], self._scalars, module=module)
        return pooled

    def write_update(self, grad: Ref) -> None:
        """Gradients added up by key, and the update of the rows."""
        self.builder.open_scope("DynamicEmbBackward", Phase.BACKWARD)
        arguments = [("grad_output", grad), *self._held, *self._states]
        self.builder.add_op("dynamicemb::update", arguments, [], self._scalars, module=self._module, forward=self._op)
