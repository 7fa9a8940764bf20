"""Ops that move no data: views, metadata, and memory handed out by the caching allocator."""

from __future__ import annotations

from traincast.costs.kernels.operands import aten
from traincast.costs.kernels.registry import Item, LoweringContext, lowers
from traincast.ir.ops import Signature

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


MOVES_NOTHING = frozenset((*aten(_VIEWS, _ALLOCATIONS, _METADATA), *_OTHER))
"""Names of ops that hand out memory or look at it in another way."""


@lowers(*sorted(MOVES_NOTHING))
def free_of_device_work(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Nothing runs on the device."""
    return ()
