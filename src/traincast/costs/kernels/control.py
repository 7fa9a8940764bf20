"""Ops without kernels of their own: views, metadata, memory handed out, synchronisation."""

from __future__ import annotations

from traincast.costs.kernels.operands import is_on_device, make_aten_names, read_integer_argument
from traincast.costs.kernels.registry import Control, ControlKind, Item, LoweringContext, lowers
from traincast.costs.kernels.streaming.launches import (
    STREAM_SYNCHRONIZE,
    make_elementwise_call,
    make_memcpy,
    make_reduction_call,
)
from traincast.ir.ops import Signature
from traincast.utils.errors import TraincastError

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
