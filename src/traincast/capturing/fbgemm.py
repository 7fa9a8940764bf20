"""FBGEMM's ops on meta tensors: what they make, lengths through them, and table-batched embeddings.

The library's own kernels reject meta tensors. Table-batched embeddings are one op forward, and one with the fused
update backward, with the names and arguments of its CUDA kernels. Lengths of jagged tensors do not depend on the ids
that are moved with them; where ids decide which rank holds a row, unknown ones are taken to be spread evenly.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from traincast.capturing.assumptions import get_assumptions
from traincast.capturing.errors import MASK, reject_values

_SPACE = "fbgemm"
Known = Callable[[torch.Tensor], "list[int] | None"]
"""The numbers of a tensor, None where they are not known."""


class _PermutedPooled(torch.autograd.Function):
    """Columns of pooled embeddings in another order, and their gradients back: one kernel each way."""

    @staticmethod
    def forward(ctx: Any, op: Any, pooled: Any, offsets: Any, order: Any, back_offsets: Any, back_order: Any) -> Any:
        ctx.call = (op, (back_offsets, back_order, offsets, order))
        return op(pooled, offsets, order, back_offsets, back_order)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        op, orders = ctx.call
        return None, op(grad, *orders), None, None, None, None


def _permute_pooled(*args: Any, **kwargs: Any) -> Any:
    return _PermutedPooled.apply(torch.ops.fbgemm.permute_pooled_embs_split.default, *args, **kwargs)  # type: ignore[no-untyped-call]


class _SelectedRows(torch.autograd.Function):
    """Rows of several tables picked in one kernel; its gradient is added up by row in another."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, indices: torch.Tensor, *rest: Any) -> Any:
        ctx.save_for_backward(indices)
        ctx.size, ctx.rest = rows.numel(), len(rest)
        return torch.ops.fbgemm.batch_index_select_dim0.default(rows, indices, *rest)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _define_select_backward()(grad, *ctx.saved_tensors, ctx.size), None, *[None] * ctx.rest


@cache
def _define_select_backward() -> Any:
    library: Any = torch.library.Library(SPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    _KEPT.append(library)
    library.define("batch_index_select_dim0_backward(Tensor grad_output, Tensor indices, int elements) -> Tensor")
    library.impl("batch_index_select_dim0_backward", lambda grad, _, elements: grad.new_empty(elements), "Meta")
    return getattr(torch.ops, SPACE).batch_index_select_dim0_backward.default


def _select_rows(
    inputs: torch.Tensor, indices: torch.Tensor, input_num_indices: list[int], input_rows: list[int],
    input_columns: list[int], permute_output_dim_0_1: bool = False,
) -> Any:  # fmt: skip
    sizes = (input_num_indices, input_rows, input_columns, permute_output_dim_0_1)
    return _SelectedRows.apply(inputs, indices, *sizes)  # type: ignore[no-untyped-call]


_REPLACED: dict[str, Callable[..., Any]] = {
    "permute_pooled_embs_auto_grad_split": _permute_pooled,
    "batch_index_select_dim0": _select_rows,
}
_MANAGED = ("new_unified_tensor", "new_managed_tensor", "new_host_mapped_tensor", "new_vanilla_managed_tensor")


def makes_managed(func: Any) -> bool:
    """Whether an op of FBGEMM makes a tensor in unified memory."""
    return _find_name(func) in _MANAGED


def find_fbgemm_function(func: Any) -> Callable[..., Any] | None:
    """A function of other ops that an op of FBGEMM is made of on a GPU; None for all other functions."""
    return _REPLACED.get(_find_name(func))


def _find_name(func: Any) -> str:
    """The name of an op of FBGEMM; "" for all other functions."""
    space, _, op = (getattr(func, "_qualified_op_name", None) or "").replace("::", ".").partition(".")
    return str(op.partition(".")[0]) if space == _SPACE else ""


def complete_jagged(
    known: Known, dense: torch.Tensor, offsets: list[torch.Tensor], total: int | None = None, **named: Any
) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """The arguments of `dense_to_jagged` with the number of rows it makes, which its kernel reads from the offsets."""
    rows = named.get("total_L", total)
    if rows is None and (ends := known(offsets[-1])) is not None:
        rows = int(ends[-1])
    if rows is None:
        rows = get_assumptions().find_count(dense.shape[0] * dense.shape[1])
    if rows is None:
        raise reject_values("fbgemm::dense_to_jagged", f"state how much is no padding: {MASK}")
    return dense, offsets, rows


def makes_jagged(func: Any) -> bool:
    """Whether an op makes rows of a padded tensor, as many as its offsets say."""
    return _find_name(func) == "dense_to_jagged"


def _return_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _infer_unique(indices: torch.Tensor, largest: int, compute_count: bool) -> Any:
    """As many places as indices, how many are used, and how often each index is there."""
    counts = indices.new_empty(indices.numel(), dtype=torch.int32) if compute_count else None
    return torch.empty_like(indices), indices.new_empty(1, dtype=torch.int32), counts


def _infer_segments(
    values: torch.Tensor, lengths: torch.Tensor, offsets: torch.Tensor, indices: torch.Tensor, batch_size: int,
    weights: torch.Tensor | None = None, selected_lengths_sum: int | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Segments of every `batch_size` that are picked: where nobody says how long they are, as long as the others."""
    total = selected_lengths_sum
    if total is None:
        total = round(values.numel() * indices.numel() / max(1, batch_size))
    picked = [values.new_empty(total), lengths.new_empty(indices.numel() * (lengths.numel() // batch_size))]
    return picked if weights is None else [*picked, weights.new_empty(total)]


def _infer_selected(
    inputs: torch.Tensor, indices: torch.Tensor, counts: list[int], rows: list[int], columns: list[int], *rest: Any
) -> torch.Tensor:
    """As many rows of every table as are picked there."""
    return inputs.new_empty(sum(count * width for count, width in zip(counts, columns, strict=True)))


_SHAPES: dict[str, Callable[..., Any]] = {
    "fbgemm::batch_index_select_dim0": _infer_selected,
    "fbgemm::keyed_jagged_index_select_dim1": _infer_segments,
    "fbgemm::lxu_cache_flush": _return_nothing,
    "fbgemm::lru_cache_populate": _return_nothing,
    "fbgemm::lfu_cache_populate": _return_nothing,
    "fbgemm::lxu_cache_locations_update": _return_nothing,
    "fbgemm::lxu_cache_locking_counter_decrement": _return_nothing,
    "fbgemm::reset_weight_momentum": _return_nothing,
    "fbgemm::get_unique_indices": _infer_unique,
    "fbgemm::uvm_storage": lambda tensor: False,
}


def find_fbgemm_shape(name: str) -> Callable[..., Any] | None:
    """What an op of this name makes, where its library does not say."""
    return _SHAPES.get(name)


Read = Callable[[torch.Tensor], "torch.Tensor | None"]
"""The values of a tensor, None where they are not known."""
_EVEN = "ids whose values are not known are taken to be spread evenly over the blocks of rows"


def find_lengths(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], read: Read) -> dict[int, torch.Tensor]:
    """The values of results that follow from lengths alone, by their position."""
    find = _FINDERS.get(name)
    return {} if find is None else find(read, *args, **kwargs)


def has_lengths(name: str) -> bool:
    """Whether an op of this name passes lengths on."""
    return name in _FINDERS


def _permute_lengths(read: Read, permute: torch.Tensor, lengths: torch.Tensor, *rest: Any, **options: Any) -> Any:
    order, known = read(permute), read(lengths)
    return {} if order is None or known is None else {0: known[order.long()]}


def _spread_lengths(
    read: Read, lengths: torch.Tensor, indices: torch.Tensor, bucketize_pos: bool, sequence: bool,
    block_sizes: torch.Tensor, my_size: int, *rest: Any, **options: Any,
) -> Any:  # fmt: skip
    """Every `my_size`-th id goes to the same block: lengths of bags add up, and blocks get equally many."""
    known = read(lengths)
    if known is None or read(indices) is not None:
        return {}
    get_assumptions().note_assumption(_EVEN)
    ends = known.cumsum(0, dtype=torch.int64)
    starts = ends - known
    blocks = torch.arange(my_size)[:, None]
    below = [(places[None] - blocks + my_size - 1).div(my_size, rounding_mode="floor") for places in (starts, ends)]
    return {0: (below[1] - below[0]).reshape(-1).to(known.dtype)}


def _pick_segments(
    read: Read, values: torch.Tensor, lengths: torch.Tensor, offsets: torch.Tensor, indices: torch.Tensor,
    batch_size: int, *rest: Any, **options: Any,
) -> Any:  # fmt: skip
    """Segments of one batch in another order: their lengths, and what is in them where that is known."""
    sizes, order, inside = read(lengths), read(indices), read(values)
    if sizes is None or order is None or sizes.numel() != batch_size:
        return {}
    found = {1: sizes[order.long()]}
    if inside is not None:
        ends = sizes.cumsum(0)
        found[0] = torch.cat([inside[ends[place] - sizes[place] : ends[place]] for place in order.tolist()])
    return found


_FINDERS: dict[str, Callable[..., Any]] = {
    "fbgemm::keyed_jagged_index_select_dim1": _pick_segments,
    "fbgemm::permute_2D_sparse_data": _permute_lengths,
    "fbgemm::permute_1D_sparse_data": _permute_lengths,
    "fbgemm::block_bucketize_sparse_features": _spread_lengths,
}


SPACE = "traincast_fbgemm"
"""Where the stubs live; they are recorded under the library's own name space."""
_LOOKUP = re.compile(r"fbgemm(?:::|\.)split_embedding_codegen_lookup_(\w+?)_function(?:_pt2)?(?:\.\w+)?$")
_DENSE = "fbgemm::dense_embedding_codegen_lookup_function"
_WEIGHT_GRADIENT = "split_embedding_codegen_grad_indice_weights_cuda"
_KNOWN = "known"
_COLUMNS, _ROWS = "D_offsets", "hash_size_cumsum"
_TABLES = (
    "Tensor{} dev_weights, Tensor D_offsets, Tensor indices, Tensor offsets, Tensor? indice_weights, int total_D, "
    "int max_D, int[] rows, int[] dims, int total_rows, int pooling_mode, int host, int vbe_output_size, "
    "int[] sharers"
)


def find_optimizer(func: Any) -> str | None:
    """The optimizer fused into a lookup of FBGEMM, `dense` if none is; None for any other function."""
    name = getattr(func, "_qualified_op_name", None)
    if name == _DENSE:
        return "dense"
    found = _LOOKUP.match(name) if name else None
    return found.group(1) if found else None


def run_lookup(func: Any, optimizer: str, args: tuple[Any, ...], kwargs: dict[str, Any], known: Known) -> torch.Tensor:
    """The pooled rows of a lookup; its backward updates the tables. FBGEMM's kernels read the shapes of tables on the
    device, so no host waits for them: `known` gives their numbers, None where they are not known."""
    schema = (func.default if hasattr(func, "default") else func)._schema
    given = {**dict(zip([a.name for a in schema.arguments], args, strict=False)), **kwargs, _KNOWN: known}
    places = [given.get(name) for name in ("dev_weights", "uvm_weights")]
    weights = next((t for t in places if t is not None and t.numel()), places[0])
    if optimizer == "dense":
        pooled: torch.Tensor = _DenseLookup.apply(weights, given)  # type: ignore[no-untyped-call]
        return pooled
    if weights is None:
        held = [t for t in given["weights"] if t.numel()]
        weights = held[0] if held else given["weights"][0]
    momenta = [
        t for name, value in given.items() if name.startswith("momentum") for t in tree_iter(value)
        if isinstance(t, torch.Tensor) and t.numel()
    ]  # fmt: skip
    result: torch.Tensor = _Lookup.apply(  # type: ignore[no-untyped-call]
        given["placeholder_autograd_tensor"], optimizer, weights, momenta, given, given.get("indice_weights")
    )
    return result


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, optimizer: str, weights: torch.Tensor, momenta: Any, given: Any, per_sample: Any
    ) -> Any:
        common = _list_common_arguments(weights, given)
        forward_op, ctx.backward_op = _get_ops(optimizer, _find_kind(given))
        ctx.momenta = momenta
        _save_common_arguments(ctx, common)
        return forward_op(*common)

    @staticmethod
    def backward(ctx: Any, grad: Any, *_: Any) -> Any:
        common = _restore_common_arguments(ctx)
        weights_grad = _find_weight_gradient(grad, common)
        ctx.backward_op(grad, *common, ctx.momenta)
        return (None, None, None, None, None, weights_grad if ctx.needs_input_grad[5] else None)


class _DenseLookup(torch.autograd.Function):
    """Without a fused optimizer: a gradient as large as the tables."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, given: Any) -> Any:
        common = _list_common_arguments(weights, given)
        forward_op, ctx.backward_op = _get_ops("dense", _find_kind(given))
        _save_common_arguments(ctx, common)
        return forward_op(*common)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        common = _restore_common_arguments(ctx)
        _find_weight_gradient(grad, common)
        return ctx.backward_op(grad, *common), None


def _find_weight_gradient(grad: torch.Tensor, common: tuple[Any, ...]) -> torch.Tensor | None:
    """The gradient of the weights of samples, which FBGEMM computes for every weighted lookup, wanted or not."""
    if common[4] is None:
        return None
    _get_ops("dense", "weighted")
    made: torch.Tensor = getattr(torch.ops, SPACE).split_embedding_codegen_grad_indice_weights_cuda(grad, *common)
    return made


_READ = slice(2, 5)  # indices, offsets and weights of samples among the common arguments


def _save_common_arguments(ctx: Any, common: tuple[Any, ...]) -> None:
    """Keeps the arguments for the backward pass. What the lookup reads goes when that is done, as FBGEMM's does; tables
    stay, and change between the two."""
    ctx.save_for_backward(*common[_READ])
    ctx.common = (*common[: _READ.start], None, None, None, *common[_READ.stop :])


def _restore_common_arguments(ctx: Any) -> tuple[Any, ...]:
    return (*ctx.common[: _READ.start], *ctx.saved_tensors, *ctx.common[_READ.stop :])


def _find_kind(given: dict[str, Any]) -> str:
    return "unweighted" if given.get("indice_weights") is None else "weighted"


def _list_common_arguments(weights: torch.Tensor, given: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments that lookup and update share."""
    return (
        weights, given["D_offsets"], given["indices"], given["offsets"], given.get("indice_weights"),
        int(given["total_D"]), int(given["max_D"]), _read_rows(given), _read_dims(given),
        weights.numel() // max(1, int(given["max_D"])), int(given["pooling_mode"]), int(_reads_host(given)),
        int(given.get("vbe_output_size") or -1), _count_sharers(given),
    )  # fmt: skip


def _reads_host(given: dict[str, Any]) -> bool:
    """Whether rows are read in host memory: they are in unified memory, and none is cached on the device."""
    listed = given.get("weights")  # on the device, in unified memory, where each is, where each begins, the cache
    in_host, cache = (listed[1], listed[-1]) if listed else (given.get("uvm_weights"), given.get("lxu_cache_weights"))
    return in_host is not None and in_host.numel() > 0 and (cache is None or not cache.numel())


def _read_dims(given: dict[str, Any]) -> list[int]:
    """Columns of every table, from the columns of all tables before each: known, or stated by the user."""
    from traincast.capturing.errors import reject_values

    places = given[_KNOWN](given[_COLUMNS])
    try:
        places = given[_COLUMNS].tolist() if places is None else places
    except RuntimeError as error:
        raise reject_values("the widths of FBGEMM's tables", "build them with widths known on the host") from error
    return [b - a for a, b in zip(places, places[1:], strict=False)]


def _read_rows(given: dict[str, Any]) -> list[int]:
    """Heights of every table, from the rows of all tables before each; none where these are not known."""
    starts = _read_starts(given)
    places = sorted(set(starts))
    ends = dict(zip(places, places[1:], strict=False))  # lookups of one table begin at the same row
    return [ends.get(start, start) - start for start in starts[:-1]]


def _read_starts(given: dict[str, Any]) -> list[int]:
    """The first row of the table of every lookup, counted on through all tables, and the end."""
    return (given[_KNOWN](given[_ROWS]) if _ROWS in given else None) or [0]


def _count_sharers(given: dict[str, Any]) -> list[int]:
    """How many lookups each lookup's table has."""
    starts = _read_starts(given)[:-1]
    return [starts.count(start) for start in starts]


@cache
def _get_ops(optimizer: str, kind: str) -> tuple[Any, Any]:
    """The two ops, defined when first used."""
    library: Any = torch.library.Library(SPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    _KEPT.append(library)
    dense = optimizer == "dense"
    forward = (
        f"dense_embedding_codegen_forward_{kind}_cuda" if dense else f"split_embedding_codegen_forward_{kind}_cuda"
    )
    backward = f"split_embedding_backward_codegen_{optimizer}_{kind}_exact_cuda"
    if not hasattr(getattr(torch.ops, SPACE), forward):
        library.define(f"{forward}({_TABLES.format('')}) -> Tensor")
        library.impl(forward, _infer_pooled, "Meta")
    if not hasattr(getattr(torch.ops, SPACE), _WEIGHT_GRADIENT):
        library.define(f"{_WEIGHT_GRADIENT}(Tensor grad_output, {_TABLES.format('')}) -> Tensor")
        library.impl(_WEIGHT_GRADIENT, lambda grad, weights, columns, ids, *rest: grad.new_empty(ids.numel()), "Meta")
    if dense and not hasattr(getattr(torch.ops, SPACE), backward):
        library.define(f"{backward}(Tensor grad_output, {_TABLES.format('')}) -> Tensor")
        library.impl(backward, lambda grad, weights, *rest: torch.empty_like(weights), "Meta")
    if not hasattr(getattr(torch.ops, SPACE), backward):
        library.define(f"{backward}(Tensor grad_output, {_TABLES.format('(a!)')}, Tensor(b!)[] momentum) -> ()")
        library.impl(backward, lambda *args: None, "Meta")
    space = getattr(torch.ops, SPACE)
    return getattr(space, forward).default, getattr(space, backward).default


_KEPT: list[Any] = []


def _infer_pooled(
    weights: torch.Tensor, columns: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, per_sample: Any,
    total: int, widest: int, row_counts: list[int], dims: list[int], rows: int, pooling: int, host: int,
    vbe_output_size: int, sharers: list[int],
) -> torch.Tensor:  # fmt: skip
    if vbe_output_size >= 0:  # features have batches of their own: their rows one after the other
        return weights.new_empty(vbe_output_size, dtype=torch.float32)
    if pooling == 2:  # no pooling: a row per lookup
        return weights.new_empty((indices.numel(), widest), dtype=torch.float32)
    samples = (offsets.numel() - 1) // len(dims)
    return weights.new_empty((samples, total), dtype=torch.float32)
