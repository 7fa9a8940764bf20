"""Tables whose rows are found by key: dynamic hash tables (DynamicEmb, HierarchicalKV), and rows on a drive behind a
cache (FBGEMM's key-value tables).

The launches of DynamicEmb's training step: different keys, their places, rows into a buffer, rows from it; gradients
added up by key, rows updated in place. Chosen with `dynamicemb_fbgemm_h100.csv` in view, as are the two constants.
"""

from __future__ import annotations

from traincast.costs.kernels.contract import KernelCall
from traincast.costs.kernels.embedding.lowering.inputs import make_populate_items, make_prefix_sum
from traincast.costs.kernels.embedding.physics import Tables, make_fill_call, make_uniform_tables
from traincast.costs.kernels.given import GIVEN
from traincast.costs.kernels.registry import (
    Item,
    LoweringContext,
    get_compute_type,
    lowers,
    read_integer_argument,
    require_operand,
)
from traincast.costs.kernels.streaming import ELEMENTWISE, INDEX
from traincast.costs.kernels.streaming.launches import make_fill_kernel
from traincast.costs.kernels.streaming.lowering.index import count_index_bits, make_radix_sort
from traincast.ir.ops import Signature, TensorSpec

_BUCKET = 128  # slots of a bucket in HierarchicalKV and DynamicEmb: a byte of each key's hash, all read at once
_SLOT_BYTES = 16  # of the table in which different keys are found: a key and its place
_INSERT_SECONDS = 1.5e-9  # a key: its bucket locked, searched, written
_HOST_ROW_SECONDS = 25e-9  # a row in host memory, besides its bytes


def _make_probe(keys: float, nbytes: int) -> KernelCall:
    """Every key at a random place of a table, with `nbytes` side by side there."""
    words = nbytes // 8
    return INDEX.call(
        "gather", "int64", elements=keys * words, row_elements=words, bytes_read=keys * (8 + nbytes),
        bytes_written=keys * 8,
    )  # fmt: skip


def _make_host_rows(rows: int, nbytes: float) -> tuple[Item, ...]:
    """Rows of a table in host memory, `nbytes` together, that come or go over the link."""
    if not rows:
        return ()
    waits = GIVEN.call("given", "fp32", seconds=_HOST_ROW_SECONDS * rows, flops=0.0, bytes=0.0)
    return waits, make_fill_call(0, nbytes)


def _make_tables(batch: int, lookups: float, rows: int, dim: int, values: TensorSpec) -> Tables:
    return make_uniform_tables(
        batch=batch, lookups=round(lookups), rows=(rows,), dims=(dim,), index_bytes=8, row_item_bytes=values.itemsize
    )


@lowers("dynamicemb::lookup")
def lower_hash_lookup(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Different keys, a bucket each, rows of the device and of the host into a buffer, and bags from that."""
    keys, values = require_operand(signature, "indices", 0), require_operand(signature, "dev_weights", 1)
    distinct, on_host, dim = (read_integer_argument(signature, name) for name in ("unique_rows", "host_rows", "dim"))
    slots = TensorSpec((4 * keys.numel,), (1,), "int64", "cuda")
    here = max(1, distinct - on_host)
    rows = max(1, values.numel // dim)
    bags, compute = signature.outputs[0].numel // dim, get_compute_type(values)
    return (
        make_fill_kernel(slots),
        _make_probe(keys.numel, _SLOT_BYTES),
        *make_prefix_sum(keys),
        _make_probe(keys.numel, _SLOT_BYTES),
        _make_probe(distinct, _BUCKET),
        GIVEN.call("given", "fp32", seconds=_INSERT_SECONDS * distinct, flops=0.0, bytes=0.0),
        _make_tables(here, here, rows, dim, values).call("row_gather", compute),
        *_make_host_rows(on_host, float(on_host * dim * values.itemsize)),
        _make_tables(bags, keys.numel, max(1, distinct), dim, values).call("tbe_forward", compute),
    )


@lowers("dynamicemb::update")
def lower_hash_update(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Gradients sorted and added up by key, then rows with their optimizer's state."""
    keys, values = require_operand(signature, "indices", 1), require_operand(signature, "dev_weights", 2)
    names = ("unique_rows", "host_rows", "dim", "state_bytes")
    distinct, on_host, dim, state = (read_integer_argument(signature, name) for name in names)
    bags, row = require_operand(signature, "grad_output", 0).numel // dim, dim * values.itemsize
    summed = _make_tables(bags, keys.numel, max(1, distinct), dim, values).call("tbe_backward_dense")
    here = distinct - on_host
    update = ELEMENTWISE.call(
        "optimizer", "fp32", elements=here * dim, bytes_read=float(distinct * row + here * (row + state)),
        bytes_written=float(here * (row + state)), tensors=2,
    )  # fmt: skip
    return (
        *make_radix_sort(keys.numel, count_index_bits(max(1, distinct)), 4, 4),
        summed,
        update,
        *_make_host_rows(on_host, float(on_host * (row + state))),
    )


@lowers("traincast::drive_cache_populate")
def lower_drive_populate(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """The cache is searched as one of unified memory; what it lacks is read from the drive, and what goes written."""
    indices = require_operand(signature, "linear_cache_indices", 1)
    names = ("fetched_bytes", "unique_rows", "total_rows", "drive_bytes_per_s")
    nbytes, distinct, rows, rate = (read_integer_argument(signature, name) for name in names)
    moved = GIVEN.call("given", "fp32", seconds=2.0 * nbytes / max(1, rate), flops=0.0, bytes=0.0)
    return (*make_populate_items(indices, count_index_bits(max(1, rows)), distinct, float(nbytes)), moved)
