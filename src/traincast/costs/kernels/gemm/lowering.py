"""GEMMs. A bias vector is added in the GEMM's epilogue (`addmm` since PyTorch 1.12, `linear` since 2.0);
before, it is copied into the result first."""

from __future__ import annotations

from math import prod

from traincast.costs.kernels.gemm import GEMM
from traincast.costs.kernels.registry import (
    Item,
    LoweringContext,
    find_operand,
    get_gemm_compute_type,
    lowers,
    require_operand,
)
from traincast.costs.kernels.streaming.launches import (
    make_device_copy,
    make_iterated_call,
    make_layout_copy,
    make_reduction_call,
)
from traincast.ir.ops import Signature, TensorSpec


def _read_order(spec: TensorSpec) -> tuple[int, bool]:
    """(1 when the matrix is stored transposed, whether the BLAS can read it in place)."""
    rows, cols = spec.shape[-2:]
    row_stride, col_stride = spec.stride[-2:]
    if (col_stride == 1 or cols == 1) and (row_stride >= cols or rows == 1):
        return 0, True
    if (row_stride == 1 or rows == 1) and (col_stride >= rows or cols == 1):
        return 1, True
    return 0, False


_ANY_SIZE_SINCE = (1, 7)  # PyTorch with CUDA 11, whose BLAS runs 16-bit GEMMs of any size on tensor cores
_TILE = 8  # before, every side must be a multiple of this (cuBLAS, "Tensor Core Usage")


def _choose_compute(left: TensorSpec, right: TensorSpec, context: LoweringContext) -> str:
    """The arithmetic of a GEMM: plain cores where an old BLAS has no tensor-core kernel for its sides."""
    compute = get_gemm_compute_type(left, tf32=context.tf32)
    odd = any(side % _TILE for side in (*left.shape[-2:], right.shape[-1]))
    return "fp32" if compute == "fp16" and odd and context.framework_version < _ANY_SIZE_SINCE else compute


def _make_gemm_call(
    left: TensorSpec, right: TensorSpec, context: LoweringContext, *, kind: str = "mm", bias: int = 0
) -> tuple[Item, ...]:
    """The GEMM of two (stacks of) matrices, with copies of operands that the BLAS cannot read in place."""
    trans_a, left_fits = _read_order(left)
    trans_b, right_fits = _read_order(right)
    copies = tuple(make_layout_copy(spec) for spec, fits in ((left, left_fits), (right, right_fits)) if not fits)
    parts = 2 if left.dtype.startswith("complex") else 1  # real and imaginary: four real products
    call = GEMM.call(
        kind,
        _choose_compute(left, right, context),
        batch=prod(left.shape[:-2]),
        m=parts * left.shape[-2],
        n=parts * right.shape[-1],
        k=left.shape[-1],
        trans_a=trans_a,
        trans_b=trans_b,
        bias=bias,
    )
    return (*copies, call)


def _make_column(vector: TensorSpec) -> TensorSpec:
    """A vector as a matrix of one column."""
    return TensorSpec((*vector.shape, 1), (*vector.stride, 1), vector.dtype, vector.device)


def _adds_in_epilogue(bias: TensorSpec, right: TensorSpec, scaled: bool, context: LoweringContext) -> bool:
    """cuBLASLt's bias epilogue takes a vector, unscaled, for GEMMs with more than one column and depth."""
    vector = len(bias.shape) == 1 or (len(bias.shape) == 2 and bias.shape[0] == 1)
    return context.framework_version >= (1, 12) and vector and not scaled and min(right.shape) > 1


@lowers("aten::mm", "aten::_int_mm")
def lower_mm(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One GEMM."""
    return _make_gemm_call(require_operand(signature, "self", 0), require_operand(signature, "mat2", 1), context)


@lowers("aten::bmm")
def lower_bmm(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """A stack of GEMMs."""
    return _make_gemm_call(
        require_operand(signature, "self", 0), require_operand(signature, "mat2", 1), context, kind="bmm"
    )


@lowers("aten::addmm", "aten::addmm_", "aten::_addmm_activation")
def lower_addmm(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """A GEMM plus a matrix or a bias vector; an activation of `_addmm_activation` rides in the epilogue."""
    bias = require_operand(signature, "self", 0)
    left, right = require_operand(signature, "mat1", 1), require_operand(signature, "mat2", 2)
    scaled = signature.scalar("beta", 1) != 1 or signature.scalar("alpha", 1) != 1
    if _adds_in_epilogue(bias, right, scaled, context):
        return _make_gemm_call(left, right, context, kind="linear", bias=1)
    return (
        *_make_accumulator_copy(signature, bias, in_place=signature.name.endswith("_")),
        *_make_gemm_call(left, right, context),
    )


@lowers("aten::baddbmm", "aten::baddbmm_")
def lower_baddbmm(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """A stack of GEMMs plus a matrix: the matrix is copied into the result, which accumulates."""
    bias = require_operand(signature, "self", 0)
    left, right = require_operand(signature, "batch1", 1), require_operand(signature, "batch2", 2)
    before = _make_accumulator_copy(signature, bias, in_place=signature.name.endswith("_"))
    return (*before, *_make_gemm_call(left, right, context, kind="bmm"))


def _make_accumulator_copy(signature: Signature, bias: TensorSpec, *, in_place: bool) -> tuple[Item, ...]:
    """The copy that puts the added matrix into the result before the GEMM accumulates onto it."""
    if in_place or signature.scalar("beta", 1) == 0:
        return ()
    result = signature.outputs[0]
    if bias.numel < result.numel:
        return (make_iterated_call("copy", (bias,), (result,)),)
    return make_device_copy(bias, result)


@lowers("aten::linear")
def lower_linear(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """A linear layer over the last dimension of any number of leading ones."""
    source, weight = require_operand(signature, "input", 0), require_operand(signature, "weight", 1)
    has_bias = len(signature.tensors("bias")) > 0 if signature.groups else len(signature.inputs) > 2
    rows, depth = prod(source.shape[:-1]), source.shape[-1]
    left = TensorSpec((rows, depth), (depth, 1), source.dtype, source.device)
    right = TensorSpec((depth, weight.shape[0]), weight.stride[::-1], weight.dtype, weight.device)
    before = () if source.is_contiguous else (make_layout_copy(source),)
    if has_bias and context.framework_version < (2, 0):
        bias = signature.inputs[2]
        copied = make_iterated_call("copy", (bias,), signature.outputs)
        return (*before, copied, *_make_gemm_call(left, right, context))
    kind = "linear" if has_bias else "mm"
    return (*before, *_make_gemm_call(left, right, context, kind=kind, bias=int(has_bias)))


@lowers("aten::mv", "aten::addmv", "aten::addmv_")
def lower_mv(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Matrix times vector, `addmv` onto a copy of its first argument."""
    matrix, vector = signature.inputs[-2:]
    before: tuple[Item, ...] = ()
    if signature.name == "aten::addmv":
        before = _make_accumulator_copy(signature, signature.inputs[0], in_place=False)
    return (*before, *_make_gemm_call(matrix, _make_column(vector), context))


@lowers("aten::_scaled_mm")
def lower_scaled_mm(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """A GEMM of fp8 operands with their scales; a bias rides in the epilogue."""
    bias = find_operand(signature, "bias", 4)
    kind, added = ("linear", 1) if bias is not None else ("mm", 0)
    return _make_gemm_call(
        require_operand(signature, "self", 0), require_operand(signature, "mat2", 1), context, kind=kind, bias=added
    )


@lowers("aten::_grouped_mm", "aten::_scaled_grouped_mm")
def lower_grouped_mm(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One GEMM per group (expert) in one kernel. Rows, columns or the depth are divided among the groups, whose
    sizes only the device knows: they are taken to be equal."""
    left, right = require_operand(signature, "self", 0), require_operand(signature, "mat2", 1)
    result = signature.outputs[0]
    stacked = [spec.shape[0] for spec in (left, right, result) if len(spec.shape) == 3]
    groups = max(1, stacked[0] if stacked else 1)
    rows, depth, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    if len(left.shape) == 2 and len(right.shape) == 3:
        rows = -(-rows // groups)
    elif len(left.shape) == 3 and len(right.shape) == 2:
        columns = -(-columns // groups)
    elif len(left.shape) == 2:
        depth = -(-depth // groups)
    return (
        GEMM.call(
            "grouped", get_gemm_compute_type(left, tf32=context.tf32), batch=groups, m=rows, n=columns, k=depth,
            trans_a=_read_order(left)[0], trans_b=_read_order(right)[0], bias=0,
        ),
    )  # fmt: skip


@lowers("aten::dot", "aten::vdot")
def lower_dot(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """An inner product: a reduction that reads two vectors."""
    left, right = signature.inputs[:2]
    return (make_reduction_call("full", left, signature.outputs, extra_read=right.nbytes),)


@lowers("aten::ger", "aten::addr", "aten::outer")
def lower_outer(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """An outer product is an element-wise multiplication with broadcasting."""
    return (make_iterated_call("mul", signature.inputs, signature.outputs),)
