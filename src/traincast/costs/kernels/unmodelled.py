"""Ops that nobody has modelled: the larger of their bytes and their flops, marked as estimated."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from traincast.costs.kernels.contract import Calls, Family, FamilyRecord, estimate_memory_seconds, get_flop_rate
from traincast.costs.kernels.registry import Item, get_compute_type, is_on_device, make_aten_names, sum_real_bytes
from traincast.hardware.device import Device
from traincast.ir.ops import Signature, TensorSpec
from traincast.utils.arrays import FloatArray

_FIELDS = ("elements", "bytes_read", "bytes_written", "tensors", "flops")
UNMODELLED = Family("unmodelled", ("stream", "product", "factorisation"), _FIELDS)
"""Ops whose flops follow from their shapes: no contraction, GEMMs, or a factorisation of matrices."""
OPAQUE = Family("opaque", ("stream", "product"), _FIELDS)
"""Ops of untrusted input: what they compute cannot be known from shapes, so flops are a guess."""
_PRODUCTS = frozenset(make_aten_names("""
    addbmm addbmm_ matmul linalg_matmul chain_matmul linalg_multi_dot linear_backward matmul_backward _trilinear
    bilinear _cdist_forward _cdist_backward _pdist_forward _pdist_backward _sparse_mm _sparse_addmm smm hspmm
    sspaddmm sparse_sampled_addmm _sparse_mm_reduce_impl _sparse_mm_reduce_impl_backward _sparse_sparse_matmul
    _cslt_sparse_mm _sparse_semi_structured_mm _sparse_semi_structured_addmm _sparse_semi_structured_linear
    _weight_int4pack_mm _weight_int4pack_mm_with_scales_and_zeros _weight_int8pack_mm _dyn_quant_matmul_4bit
    _mixed_dtypes_linear _scaled_mm_v2 _scaled_grouped_mm_v2 _foreach_mm mkldnn_linear mkldnn_linear_backward
    fbgemm_linear_fp16_weight fbgemm_linear_int8_weight _wrapped_quantized_linear_prepacked
"""))  # fmt: skip
_CONVOLUTIONS = frozenset(make_aten_names("""
    conv_tbc conv_tbc_backward _convolution_double_backward slow_conv3d slow_conv_dilated2d slow_conv_dilated3d
    slow_conv_transpose2d slow_conv_transpose3d mkldnn_convolution miopen_convolution_relu
    miopen_convolution_add_relu conv_transpose1d conv_transpose2d conv_transpose3d _convolution_mode
"""))  # fmt: skip
# flops of one n x n matrix as a multiple of n cubed (Golub and Van Loan, Matrix Computations)
_FACTORISATIONS = {
    "cholesky": 1 / 3, "lu_factor": 2 / 3, "lu_with_info": 2 / 3, "det": 2 / 3, "ldl": 1 / 3, "solve": 8 / 3,
    "inv": 2.0, "qr": 4 / 3, "householder": 4 / 3, "geqrf": 4 / 3, "lstsq": 4 / 3, "eigh": 9.0, "eig": 25.0,
    "svd": 22.0, "pinv": 22.0, "matrix_exp": 20.0, "matrix_power": 4.0, "linear_combination": 2.0,
}  # fmt: skip
_OPS_PER_POINT = 5.0  # of a fast Fourier transform, times the logarithm of its length
_KNOWN = ("aten::", "prims::")
# of the sustained rate: GEMMs as libraries do them at middling sizes; factorisations wait for one column after the
# other (assumed, within the interval of the family)
_SHARE = {"stream": 0.5, "product": 0.6, "factorisation": 0.1}


def _make_record(family: Family, sigma: float) -> FamilyRecord:
    return FamilyRecord(
        family=family, package=__name__, lowering=(), roofline=":unmodelled_seconds", roofline_sigma=sigma
    )


RECORDS = (
    _make_record(UNMODELLED, 0.7),  # a factor of two either way: assumed of an op that nobody measured
    _make_record(OPAQUE, 1.4),  # a factor of four: bytes and shapes may say nothing of what is computed
)


def classify_arithmetic(signature: Signature) -> tuple[str, float]:
    """(kind of `UNMODELLED`, flops): "product" and "factorisation" contract, "stream" does not."""
    name, outputs = signature.name, [spec for spec in signature.outputs if spec.numel]
    if name in _PRODUCTS:
        return "product", max((count_product_flops(signature.inputs, spec) for spec in outputs), default=0.0)
    if name in _CONVOLUTIONS:
        return "product", _count_convolution_flops(signature.inputs, outputs)
    word = name.partition("::")[2]
    if word.startswith("_fft"):
        return "stream", sum(_OPS_PER_POINT * spec.numel * math.log2(max(2, spec.shape[-1])) for spec in outputs[:1])
    multiple = next((factor for part, factor in _FACTORISATIONS.items() if part in word), None)
    if multiple is not None and name.startswith("aten::"):
        return "factorisation", multiple * _count_cubed_flops(signature.inputs)
    return "stream", float(max((spec.numel for spec in outputs), default=0))


def guess_contraction_flops(signature: Signature) -> float:
    """Flops of an op of unknown meaning if its shapes look like a product: two operands share a size that the result
    lacks, and the result has a size of each. 0 where they do not (square matrices tell nothing)."""
    most = 0.0
    for result in signature.outputs:
        for i, left in enumerate(signature.inputs):
            if any(_is_contraction(left, right, result) for right in signature.inputs[i + 1 :]):
                most = max(most, count_product_flops(signature.inputs, result))
    return most


def count_product_flops(operands: Sequence[TensorSpec], result: TensorSpec) -> float:
    """Flops of a product of the two largest operands, whichever way they are stored: for m x k, k x n and m x n
    elements the root of all three together is m k n. Leading sizes that all three share are a stack of GEMMs."""
    largest = sorted(operands, key=lambda spec: spec.numel)[-2:]
    if len(largest) < 2 or not result.numel:
        return 0.0
    stack = 1.0
    for sizes in zip(*(spec.shape[:-2] for spec in (*largest, result)), strict=False):
        if len(set(sizes)) > 1:
            break
        stack *= max(1, sizes[0])
    return 2.0 * math.sqrt(math.prod(spec.numel for spec in (*largest, result)) / stack)


def _is_contraction(left: TensorSpec, right: TensorSpec, result: TensorSpec) -> bool:
    if min(len(left.shape), len(right.shape)) < 2 or not result.shape:
        return False
    one, other, made = ({size for size in spec.shape if size > 1} for spec in (left, right, result))
    gone = (one & other) - made
    return bool(gone) and bool((one - gone) & made) and bool((other - gone) & made)


def _count_convolution_flops(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> float:
    """Every element of the result meets the window of all its input channels: the weights that one channel has."""
    operands = sorted((spec for spec in inputs if len(spec.shape) > 2), key=lambda spec: spec.numel)
    if len(operands) < 2 or not outputs:
        return 0.0
    weight, result = operands[0], max(outputs, key=lambda spec: spec.numel)
    channels = max((size for size in weight.shape if size in result.shape), default=1)
    return 2.0 * result.numel * weight.numel / max(1, channels)


def _count_cubed_flops(inputs: Sequence[TensorSpec]) -> float:
    """Elements of the largest stack of matrices times their smaller side: n cubed for each square one."""
    matrices = [spec for spec in inputs if len(spec.shape) > 1]
    return max((float(spec.numel * min(spec.shape[-2:])) for spec in matrices), default=0.0)


def estimate_unknown(signature: Signature) -> tuple[Item, ...]:
    """One kernel that reads every input and writes every output; nothing for an op without device tensors.

    Of PyTorch's own ops it is known which contract. An op of anybody else may compute anything: its flops are guessed
    from its shapes, and its family says so with a wider interval.
    """
    inputs = [spec for spec in signature.inputs if is_on_device(spec)]
    outputs = [spec for spec in signature.outputs if is_on_device(spec)]
    if not inputs and not outputs:
        return ()
    specs = (*inputs, *outputs)
    if signature.name.startswith(_KNOWN):
        family, (kind, flops) = UNMODELLED, classify_arithmetic(signature)
    else:
        flops = guess_contraction_flops(signature)
        family, kind = OPAQUE, "product" if flops else "stream"
    call = family.call(
        kind,
        get_compute_type(outputs[0] if outputs else inputs[0]),
        elements=max(1, max(spec.numel for spec in specs)),
        bytes_read=sum_real_bytes(inputs),
        bytes_written=sum_real_bytes(outputs),
        tensors=len(specs),
        flops=flops,
        estimated=True,
    )
    return (call,)


def unmodelled_seconds(calls: Calls, device: Device, start: float) -> FloatArray:
    """Every byte once, or the flops at a share of what the device sustains, whichever takes longer."""
    share = np.array([_SHARE[kind] for kind in calls.family.kinds])[calls.kind]
    rate = share * np.where(calls.is_kind("product"), get_flop_rate(calls, device), device.get_sustained_flops("fp32"))
    moved = estimate_memory_seconds(calls["bytes_read"] + calls["bytes_written"], device)
    return np.asarray(start + np.maximum(calls["flops"] / rate, moved))
