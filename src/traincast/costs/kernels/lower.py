"""From an op to its kernel launches, by the lowering that its family registered."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import import_module

from traincast.costs.kernels.call import KernelCall
from traincast.costs.kernels.families import RECORDS
from traincast.costs.kernels.given import lower_given
from traincast.costs.kernels.registry import LOWERINGS, Item, LoweringContext
from traincast.costs.kernels.streaming import ELEMENTWISE
from traincast.costs.kernels.unmodelled import estimate_unknown
from traincast.ir.ops import Signature
from traincast.ir.variants import NARROW_LOADS, VARIANT
from traincast.utils.errors import TraincastError, shorten_value
from traincast.utils.plugins import LOWERED, load_plugin

_LARGEST = 1e18  # of any number of a call: flops, bytes and elements of a step stay below an hour of the fastest GPU
_SHOWN_TENSORS = 6
_ALL_HERE = ("aten", "c10d", "fbgemm", "prims", "prim", "traincast")  # name spaces that no other distribution adds to
_VECTORS_SINCE = (1, 5)  # PyTorch whose element-wise kernels load several 16-bit values at once
_WITHOUT_FAMILY = ("traincast.costs.kernels.control",)


@cache
def list_registered_ops() -> frozenset[str]:
    """Names of all ops with a lowering."""
    for module in (*_WITHOUT_FAMILY, *(module for record in RECORDS for module in record.lowering_modules())):
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
