"""From ops to kernel launches, one op or a whole program at a time, by the lowering that each family registered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from importlib import import_module

import numpy as np

from traincast.costs.kernels.contract import Calls, KernelCall
from traincast.costs.kernels.families import RECORDS
from traincast.costs.kernels.given import lower_given
from traincast.costs.kernels.registry import (
    LOWERINGS,
    Control,
    ControlKind,
    Item,
    LoweringContext,
    is_on_device,
    lowers,
    make_aten_names,
    read_integer_argument,
)
from traincast.costs.kernels.streaming import ELEMENTWISE
from traincast.costs.kernels.streaming.launches import (
    STREAM_SYNCHRONIZE,
    make_elementwise_call,
    make_memcpy,
    make_reduction_call,
)
from traincast.costs.kernels.unmodelled import estimate_unknown
from traincast.ir.ops import NARROW_LOADS, VARIANT, Signature
from traincast.ir.program import Program
from traincast.ir.sizes import list_size_indices, replace_indices_by_sizes
from traincast.utils.arrays import BoolArray, IntArray
from traincast.utils.errors import TraincastError, shorten_value
from traincast.utils.plugins import LOWERED, load_plugin

_VIEWS = """
    alias _reshape_alias as_strided as_strided_ detach detach_ diagonal expand expand_as imag lift lift_fresh movedim
    narrow numpy_T permute positive real reshape reshape_as resize_ resize_as_ select slice split split_with_sizes
    chunk squeeze squeeze_ swapaxes t t_ transpose transpose_ unbind unflatten flatten unfold unsqueeze unsqueeze_
    _unsafe_view view view_as view_as_complex view_as_real _conj _neg_view resolve_conj resolve_neg unsafe_split
    unsafe_split_with_sizes unsafe_chunk tensor_split hsplit vsplit
"""
_ALLOCATIONS = """
    empty empty_like empty_strided new_empty new_empty_strided empty_permuted set_ _sparse_coo_tensor_unsafe
    _sparse_coo_tensor_with_dims _sparse_coo_tensor_with_dims_and_tensors sparse_coo_tensor
"""
_METADATA = """
    _indices indices _values values _nnz _coalesced_ is_coalesced sparse_dim dense_dim _dimI _dimV size stride
    sym_size sym_stride sym_numel sym_storage_offset is_same_size is_pinned record_stream result_type
    _version _is_zerotensor set_data requires_grad_ _fw_primal _make_dual
    _unpack_dual retain_grad output_nr is_leaf _assert_async _assert_tensor_metadata _efficientzerotensor
    _pin_memory pin_memory
"""
_OTHER = (
    "prim::device",
    "prim::layout",
    "profiler::_record_function_enter_new",
    "profiler::_record_function_exit",
)
MOVES_NOTHING = frozenset((*make_aten_names(_VIEWS, _ALLOCATIONS, _METADATA), *_OTHER))
"""Names of ops that hand out memory or look at it in another way."""
_MOST_NUMBERS = 1 << 20  # of events and streams; the simulator keeps a clock for each
_KINDS = {
    "cuda::device_synchronize": ControlKind.DEVICE_SYNCHRONIZE,
    "cuda::stream_synchronize": ControlKind.STREAM_SYNCHRONIZE,
    "cuda::event_record": ControlKind.EVENT_RECORD,
    "cuda::stream_wait_event": ControlKind.STREAM_WAIT_EVENT,
    "cuda::event_synchronize": ControlKind.EVENT_SYNCHRONIZE,
}


@lowers(*sorted(MOVES_NOTHING))
def lower_free_op(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Nothing runs on the device."""
    return ()


def _read_number(signature: Signature, name: str) -> int:
    number = read_integer_argument(signature, name, -1)
    if not -1 <= number < _MOST_NUMBERS:
        raise TraincastError(f"{name} {number} is not from -1 to {_MOST_NUMBERS - 1}")
    return number


@lowers(*_KINDS)
def lower_control(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """A control op is one control item."""
    return (
        Control(
            _KINDS[signature.name], event=_read_number(signature, "event"), stream=_read_number(signature, "stream")
        ),
    )


@lowers("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero")
def lower_item(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """`item()`: the value is copied to the host, which waits for it."""
    source = signature.inputs[0]
    if not is_on_device(source):
        return ()
    return (make_memcpy("d2h_pageable", source.itemsize), STREAM_SYNCHRONIZE)


@lowers("aten::equal")
def lower_equal(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """`torch.equal`: compare, reduce, and hand the answer to the host."""
    left = signature.inputs[0]
    if not is_on_device(left):
        return ()
    return (
        make_elementwise_call("compare", signature.inputs, (left,)),
        make_reduction_call("full", left, ()),
        make_memcpy("d2h_pageable", 1),
        STREAM_SYNCHRONIZE,
    )


_LARGEST = 1e18  # of any number of a call: flops, bytes and elements of a step stay below an hour of the fastest GPU
_SHOWN_TENSORS = 6
_ALL_HERE = ("aten", "c10d", "fbgemm", "prims", "prim", "traincast")  # name spaces that no other distribution adds to
_VECTORS_SINCE = (1, 5)  # PyTorch whose element-wise kernels load several 16-bit values at once


@cache
def list_registered_ops() -> frozenset[str]:
    """Names of all ops with a lowering."""
    for module in (module for record in RECORDS for module in record.lowering_modules()):
        import_module(module)
    return frozenset(LOWERINGS)


@cache
def _is_added(op: str) -> bool:
    """Whether another distribution has the lowering of an op; it names the module by the op's name space."""
    space = op.partition("::")[0]
    if space not in _ALL_HERE:
        load_plugin(LOWERED, space)
    return op in LOWERINGS


def lower(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """The kernel calls and synchronisations of an op; an op nobody knows gets one call marked `estimated`.

    An op whose tensors all live on the host launches nothing, nor does one of PyTorch's that we know and whose results
    are all empty (an expert without tokens). A collective launches even so: the other ranks wait for it.
    """
    specs = (*signature.inputs, *signature.outputs)
    if specs and all(spec.device.startswith("cpu") for spec in specs):
        return ()
    given = context.cost_of(signature.name) if context.costs else None
    if given is not None:
        return lower_given(signature, given)
    if signature.name not in list_registered_ops() and not _is_added(signature.name):
        return estimate_unknown(signature)
    if _is_sparse_product(signature):  # what it gathers depends on the rows that are met, and bytes do not tell
        raise TraincastError(
            f"op {shorten_value(signature.name)} multiplies a compressed sparse (CSR) matrix, which has no price here; "
            "say what it costs with `costs`, or keep the matrix in COO form"
        )
    empty = signature.outputs and not any(spec.numel for spec in signature.outputs)
    if empty and signature.name.startswith("aten::"):
        return ()
    try:
        items = LOWERINGS[signature.name](signature, context)
    except TraincastError as error:
        raise _make_misfit_error(signature, str(error)) from None
    except (AssertionError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise _make_misfit_error(signature, str(error) or type(error).__name__) from error
    for item in items:
        if isinstance(item, KernelCall) and not all(0 <= value <= _LARGEST for value in item.values):
            raise _make_misfit_error(
                signature, f"a {item.family.name} kernel would have sizes {shorten_value(item.values)}"
            )
    variant = signature.scalar(VARIANT)
    if isinstance(variant, str):
        return tuple(replace(item, variant=variant) if isinstance(item, KernelCall) else item for item in items)
    return items if context.framework_version >= _VECTORS_SINCE else tuple(map(_mark_narrow_loads, items))


def _is_sparse_product(signature: Signature) -> bool:
    """Whether a matrix product has a compressed sparse matrix, whose places are vectors of integers."""
    of_matrices = signature.name in ("aten::mm", "aten::addmm")
    return of_matrices and any(len(spec.shape) == 1 and spec.dtype == "int64" for spec in signature.inputs)


def _mark_narrow_loads(item: Item) -> Item:
    """An element-wise kernel of a PyTorch that loads value by value."""
    if isinstance(item, KernelCall) and item.family is ELEMENTWISE and item.compute in ("fp16", "bf16"):
        return replace(item, variant=NARROW_LOADS)
    return item


def _make_misfit_error(signature: Signature, reason: str) -> TraincastError:
    """The gate between workloads of untrusted input and the engine: what an op has is not what its kernels need."""
    tensors = ", ".join(f"{spec.dtype}{list(spec.shape)}" for spec in signature.inputs[:_SHOWN_TENSORS])
    more = ", ..." if len(signature.inputs) > _SHOWN_TENSORS else ""
    return TraincastError(
        f"op {shorten_value(signature.name)} cannot be turned into kernels: {reason} (its inputs: {tensors}{more}); "
        "capture the step again, or give the op other arguments"
    )


_LONG_KEY = 1024  # bytes


@dataclass(frozen=True, eq=False, slots=True)
class LoweredProgram:
    """Distinct calls of a program, and the items of each signature in launch order.

    Item values in `items[signature]` are call indices, or `-1 - i` for `controls[i]`. Programs lowered together share
    `calls`, `controls`, `estimated` and `signatures`: `plain[signature]` indexes the latter, all their signatures with
    plain sizes.
    """

    calls: tuple[KernelCall, ...]
    controls: tuple[Control, ...]
    items: tuple[tuple[int, ...], ...]
    estimated: BoolArray
    signatures: tuple[Signature, ...]
    plain: tuple[int, ...]

    def by_family(self) -> list[tuple[IntArray, Calls]]:
        """The calls grouped by family: (their indices, their columns)."""
        members: dict[str, list[int]] = {}
        for index, call in enumerate(self.calls):
            members.setdefault(call.family.name, []).append(index)
        return [
            (
                np.array(rows, dtype=np.int64),
                Calls.of(self.calls[rows[0]].family, [self.calls[i] for i in rows]),
            )
            for rows in members.values()
        ]


def lower_program(program: Program, context: LoweringContext) -> LoweredProgram:
    """Lowers every distinct signature once."""
    return lower_programs((program,), context)[0]


def lower_programs(programs: Sequence[Program], context: LoweringContext) -> tuple[LoweredProgram, ...]:
    """Lowers programs together: signatures that several have are lowered once, and all refer to the same calls."""
    templates: dict[int, list[int]] = {}
    for number, program in enumerate(programs):
        templates.setdefault(id(program.symbolic), []).append(number)
    lowering = _Lowering(context, several=len(templates) > 1)
    plain: dict[int, tuple[int, ...]] = {}
    for members in templates.values():
        alike = [programs[number] for number in members]
        plain.update(zip(members, _number_calls(alike, lowering), strict=True))
    calls, controls, signatures = tuple(lowering.calls), tuple(lowering.controls), tuple(lowering.signatures)
    estimated = np.array([call.estimated for call in calls], dtype=np.bool_)
    return tuple(
        LoweredProgram(calls, controls, tuple([lowering.items[n] for n in numbers]), estimated, signatures, numbers)
        for numbers in (plain[number] for number in range(len(programs)))
    )


class _Lowering:
    """Calls, controls and signatures so far; `items[n]` are those of signature number n.

    Signatures of one template differ; only those of `several` are looked up.
    """

    def __init__(self, context: LoweringContext, *, several: bool) -> None:
        self.context, self.several = context, several
        self.calls: dict[KernelCall, int] = {}
        self.controls: dict[Control, int] = {}
        self.signatures: list[Signature] = []
        self.items: list[tuple[int, ...]] = []
        self._known: dict[Signature, int] = {}

    def number(self, signature: Signature) -> int:
        """The number of a signature, lowered now if it is new."""
        number = len(self.items)
        if self.several:
            known = self._known.setdefault(signature, number)
            if known != number:
                return known
        row = []
        for item in lower(signature, self.context):
            if isinstance(item, Control):
                row.append(-1 - self.controls.setdefault(item, len(self.controls)))
            else:
                row.append(self.calls.setdefault(item, len(self.calls)))
        self.items.append(tuple(row))
        self.signatures.append(signature)
        return number


def _number_calls(programs: Sequence[Program], lowering: _Lowering) -> list[tuple[int, ...]]:
    """The numbers of the signatures of programs that share their symbolic ones; equal sizes are looked at once."""
    if len(programs) == 1:
        return [tuple([lowering.number(signature) for signature in programs[0].signatures])]
    values = np.stack([program.size_values for program in programs])
    varies = np.any(values != values[0], axis=0)
    changing = np.flatnonzero(varies).tolist()
    symbolic, first = programs[0].symbolic, values[0].tolist()
    used = [np.array(list_size_indices(signature), dtype=np.int64) for signature in symbolic]
    numbers = [lowering.number(*replace_indices_by_sizes((signature,), first)) for signature in symbolic]
    differ = [n for n, sizes in enumerate(used) if np.any(varies[sizes])]
    known = {n: {_make_key(values[0, used[n]]): numbers[n]} for n in differ}
    result = [tuple(numbers)]
    for row in values[1:]:
        sizes: list[int] = []
        for n in differ:
            key = _make_key(row[used[n]])
            if key not in known[n]:
                sizes = sizes or _replace_programs(first, changing, row)
                known[n][key] = lowering.number(*replace_indices_by_sizes((symbolic[n],), sizes))
            numbers[n] = known[n][key]
        result.append(tuple(numbers))
    return result


def _replace_programs(sizes: list[int], where: list[int], row: IntArray) -> list[int]:
    """A copy with other sizes at some places; the rest are the same objects, of which a thousand ranks have many."""
    copy = sizes.copy()
    for place, size in zip(where, row[where].tolist(), strict=True):
        copy[place] = size
    return copy


def _make_key(sizes: IntArray) -> bytes:
    """Sizes as a key; those of a collective between a thousand ranks as a digest, which takes less room."""
    data = sizes.tobytes()
    return data if len(data) <= _LONG_KEY else blake2b(data, digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class OpCoverage:
    """An op of a program: how often it occurs, whether its kernels are known, and how many it launches."""

    name: str
    count: int
    lowered: bool
    launches: int


def list_op_coverage(program: Program, context: LoweringContext) -> list[OpCoverage]:
    """Every op of the program, by name."""
    occurrences = Counter(program.columns.op_signature.tolist())
    rows: dict[str, tuple[int, bool, int]] = {}
    for number, signature in enumerate(program.signatures):
        calls = [item for item in lower(signature, context) if isinstance(item, KernelCall)]
        count, known, launches = rows.get(signature.name, (0, True, 0))
        times = occurrences[number]
        estimated = any(call.estimated for call in calls)
        rows[signature.name] = (count + times, known and not estimated, launches + times * len(calls))
    return [OpCoverage(name, *row) for name, row in sorted(rows.items())]
