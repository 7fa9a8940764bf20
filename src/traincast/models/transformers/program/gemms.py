"""Products with weights: in the style's arithmetic, with the casts that it needs, and low-rank adapters alongside
them."""

from __future__ import annotations

from traincast.ir.variants import ROWWISE, TUNED
from traincast.models.layers.builder import Ref, Scalars
from traincast.models.transformers.program.communication import Region
from traincast.models.transformers.program.graph import Gradients, Graph


def write_linear(
    graph: Graph, x: Ref, fan_out: int, *, bias: bool = False, weight: Ref | None = None, narrow: bool = True,
    adapted: bool = False,
) -> Ref:  # fmt: skip
    """`x` [rows, fan_in] times per weight [fan_out, fan_in] of its own, or one that is given; `narrow`: in the style's
    arithmetic, not in that of activations; `adapted`: with a low-rank adapter alongside it where the style has them."""
    rows, fan_in = x.shape
    weight = graph.weight(fan_out, fan_in) if weight is None else weight
    added = graph.weight(fan_out) if bias else None
    graph.scope("aten::linear")
    region, given = graph.regions.get(x.tensor), x
    x, used = graph.cast(x, graph.style.element), _cast_weight(graph, weight, narrow=narrow)
    result = graph.new(rows, fan_out)
    turned = graph.builder.add_view(used, (fan_in, fan_out), (1, fan_in))
    if added is None:
        _write_gemm(graph, x, turned, result, narrow=narrow)
    else:
        left, right = (_cast_to_narrow(graph, ref) if narrow else ref for ref in (x, turned))
        scalars = [("beta", 1), ("alpha", 1), *_choose_gemm_variant(graph, narrow=narrow)]
        shift = graph.copy_as(added, graph.style.element)
        graph.op("aten::addmm", [("self", shift), ("mat1", left), ("mat2", right)], [result], scalars)

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        below = graph.new(rows, fan_in)
        if region is not None and region.regather is not None:
            region.regather()
        _write_gemm(graph, grad, graph.builder.add_view(used, (fan_out, fan_in)), below, narrow=narrow)
        _plan_weight_gradient(graph, weight, grad, x, narrow=narrow and not graph.style.wide_gradients, region=region)
        if added is not None and graph.wants(added):
            total = graph.new(1, fan_out)
            graph.op("aten::sum", [("self", grad)], [total], [("dim", (0,)), ("keepdim", True)], overload="dim_IntList")
            graph.accumulate(added, graph.copy_as(total, added.spec.dtype))
        graph.add_host_ops("TBackward0", "ViewBackward0")
        return [below]

    saved = [x] if graph.wants(weight) else []
    saved += [used] if used is not weight else []
    graph.node("AddmmBackward0" if bias else "MmBackward0", [x], [result], saved, backward)
    if adapted and graph.style.adapter_rank:
        result = _add_lora_adapter(graph, x, result)
    graph.drop(*(ref for ref, own in ((x, given), (used, weight)) if ref is not own))
    return result


def _add_lora_adapter(graph: Graph, x: Ref, result: Ref) -> Ref:
    """`result` plus what a low-rank adapter makes of `x`: two narrow GEMMs, a scale and a sum (LoRA).

    Its two matrices are all that is trained; their GEMMs stay in 16 bits.
    """
    (rows, fan_in), fan_out, rank = x.shape, result.shape[1], graph.style.adapter_rank
    down, up = (graph.weight(*shape, dtype=x.spec.dtype, adapter=True) for shape in ((rank, fan_in), (fan_out, rank)))
    low, wide, total = graph.new(rows, rank), graph.new(rows, fan_out), graph.new(rows, fan_out)
    graph.scope("aten::linear")
    _write_gemm(graph, x, graph.builder.add_view(down, (fan_in, rank), (1, fan_in)), low, narrow=False)
    _write_gemm(graph, low, graph.builder.add_view(up, (rank, fan_out), (1, rank)), wide, narrow=False)
    graph.scope("aten::add")
    graph.fused([result, wide], [total])

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        _plan_weight_gradient(graph, up, grad, low, narrow=False)
        narrow_grad, below = graph.new(rows, rank), graph.new(rows, fan_in)
        _write_gemm(graph, grad, up, narrow_grad, narrow=False)
        _plan_weight_gradient(graph, down, narrow_grad, x, narrow=False)
        _write_gemm(graph, narrow_grad, down, below, narrow=False)
        graph.drop(narrow_grad)
        return [below, grad]

    graph.node("LoraBackward", [x, result], [total], [x, low], backward)
    graph.drop(low, wide, result)
    return total


def _plan_weight_gradient(
    graph: Graph, weight: Ref, grad: Ref, x: Ref, *, narrow: bool, region: Region | None = None
) -> None:
    """The product that is a weight's gradient: now, or with its `region`'s."""
    if graph.wants(weight):
        module = graph.module

        def write() -> None:
            graph.module = module
            _write_weight_gradient(graph, weight, grad, x, narrow=narrow)

        graph.defer(write, [grad, x], region)


def _write_weight_gradient(graph: Graph, weight: Ref, grad: Ref, x: Ref, *, narrow: bool) -> None:
    (fan_out, fan_in), rows = weight.shape, grad.shape[0]
    flipped = graph.builder.add_view(grad, (fan_out, rows), (1, fan_out))
    update = graph.new(fan_out, fan_in)
    if narrow and graph.style.scales_blocks:
        for operand in (grad, x):
            _cast_along_tokens(graph, operand)
    _write_gemm(graph, flipped, x, update, narrow=narrow)
    if graph.style.autocast or graph.style.wide:
        wide = graph.new(fan_out, fan_in, dtype="float32")
        graph.op("aten::_to_copy", [("self", update)], [wide], [("dtype", "float32")])
        graph.drop(wide)
    graph.accumulate(weight, update)


def _write_gemm(graph: Graph, left: Ref, right: Ref, result: Ref, *, narrow: bool) -> None:
    """A GEMM in the style's arithmetic (`narrow`) or that of activations; a scaled one includes making the scaled
    copy of its left operand."""
    first, second = (_cast_to_narrow(graph, ref) if narrow else ref for ref in (left, right))
    graph.op("aten::mm", [("self", first), ("mat2", second)], [result], _choose_gemm_variant(graph, narrow=narrow))


def _choose_gemm_variant(graph: Graph, *, narrow: bool) -> Scalars:
    """Which implementation of a GEMM runs."""
    style = graph.style
    by_row = narrow and style.precision == "fp8" and style.scaling == "row"
    return graph.variant(ROWWISE if by_row else "", TUNED if style.tuned else "")


def _cast_to_narrow(graph: Graph, ref: Ref) -> Ref:
    """An operand as the product reads it: in eight or four bits where those are asked for."""
    if not graph.style.narrow:
        return ref
    spec = ref.spec
    return graph.builder.add_reinterpreted_view(ref, spec.shape, spec.stride, graph.style.narrow)


def _cast_weight(graph: Graph, weight: Ref, *, narrow: bool) -> Ref:
    """The copy of a weight that the product reads: of an fp32 one where autocast makes it, or a scaled one, made once a
    micro-batch where it is not kept: its largest value, then a cast."""
    if graph.style.wide:
        return graph.copy_as(weight, graph.style.element)
    if graph.style.autocast:
        rounded = graph.new(*weight.shape)
        graph.op(
            "aten::_to_copy", [("self", _view_as_16_bit(graph, weight))], [rounded], [("dtype", graph.style.element)]
        )
        graph.drop(rounded)
    if not graph.style.narrow or not narrow or not graph.style.quantised_weights:
        return weight
    largest = graph.new(1, dtype="float32")
    graph.op("aten::amax", [("self", weight)], [largest])
    scaled = graph.new(*weight.shape, dtype=graph.style.narrow)
    graph.fused([weight, largest], [scaled])
    graph.drop(largest, scaled)
    return weight


def _cast_along_tokens(graph: Graph, operand: Ref) -> None:
    """A copy whose scales run along tokens, for the product that contracts over them."""
    copied = graph.new(*operand.shape, dtype=graph.style.narrow)
    graph.fused([operand], [copied])
    graph.drop(copied)


def _view_as_16_bit(graph: Graph, weight: Ref) -> Ref:
    return graph.builder.add_reinterpreted_view(weight, weight.shape, weight.spec.stride, "float32")
