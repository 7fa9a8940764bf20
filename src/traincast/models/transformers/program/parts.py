"""What layers are made of: products with weights in the style's arithmetic, norms, activations, sums, rotary
positions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from traincast.ir.ops import ROWWISE, TUNED, Phase, StorageKind
from traincast.models.layers.builder import Ref, Scalars
from traincast.models.transformers.program.graph import Gradients, Graph
from traincast.models.transformers.program.style import Region


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
            graph.accumulate(added, total, cast=added.spec.dtype)
        graph.add_host_ops("ViewBackward0", "TBackward0", "ViewBackward0")
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
    graph.accumulate(weight, update, cast="float32" if graph.style.autocast or graph.style.wide else "")


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


_BUFFER = StorageKind.BUFFER
_NARROW_ROWS = 512  # elements: PyTorch's norm has a block for a row, a compiler's several rows


def write_norm(graph: Graph, x: Ref, kind: str, *, bias: bool = False) -> Ref:
    """RMSNorm ("rms") or LayerNorm ("layer") over the last dimension, as one kernel; "rms_by_ops" is one where a vendor
    or a compiler makes it."""
    if kind == "rms_by_ops":
        if not graph.style.fused:
            return _write_rms_norm_by_ops(graph, x)
        kind = "rms"
    shape, width, dtype = x.shape, x.shape[-1], graph.style.stream
    weight = graph.weight(width)
    shift = graph.weight(width) if kind == "layer" and bias else None
    name = "_fused_rms_norm" if kind == "rms" else "native_layer_norm"
    graph.scope("aten::rms_norm" if kind == "rms" else "aten::layer_norm")
    given, x = x, graph.cast(x, dtype)
    result = graph.new(*shape, dtype=dtype)
    moments = [graph.new(x.spec.numel // width, dtype="float32") for _ in range(1 if kind == "rms" else 2)]
    extra = [("weight", weight)] + ([("bias", shift)] if shift is not None else [])
    sizes: Scalars = [("normalized_shape", (width,)), ("eps", 1e-5)]
    narrow = width <= _NARROW_ROWS and graph.style.fused and not graph.style.tuned
    if narrow:
        graph.fused([x, *(ref for _, ref in extra)], [result, *moments])
    else:
        graph.op(f"aten::{name}", [("input", x), *extra], [result, *moments], sizes)

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        below = graph.new(*shape, dtype=dtype)
        weights = [weight, *([shift] if shift is not None else [])]
        moved = [graph.new(width, dtype=dtype) for _ in weights]
        mask = (True, graph.wants(weight), shift is not None and graph.wants(shift))
        arguments = [("grad_out", grad), ("input", x), *[("moment", moment) for moment in moments], *extra]
        scalars = [("normalized_shape", (width,)), ("output_mask", mask if kind == "layer" else mask[:2])]
        if narrow:
            graph.fused([ref for _, ref in arguments], [below, *moved])
        else:
            graph.op(f"aten::{name}_backward", arguments, [below, *moved], scalars)
        for each, gradient in zip(weights, moved, strict=True):
            graph.accumulate(each, gradient)
        return [below]

    node = "FusedRmsNormBackward0" if kind == "rms" else "NativeLayerNormBackward0"
    graph.node(node, [x], [result], [x, *moments], backward)
    graph.drop(*moments, *([x] if x is not given else []))
    return result


def _write_rms_norm_by_ops(graph: Graph, x: Ref) -> Ref:
    """RMSNorm a kernel for each step of arithmetic: in fp32 up to the product with the weight."""
    shape, width, dtype = x.shape, x.shape[-1], graph.style.stream
    each = (*shape[:-1], 1)
    weight = graph.weight(width)

    def run(
        op: str, *inputs: Ref, to: tuple[int, ...] = shape, dtype: str = "float32", spent: Sequence[Ref] = ()
    ) -> Ref:
        result = graph.new(*to, dtype=dtype)
        over: Scalars = [("dim", (-1,)), ("keepdim", True)] if op in ("mean", "sum") else []
        names = ("self", "other") if len(inputs) > 1 else ("self",)
        graph.op(f"aten::{op}", list(zip(names, inputs, strict=True)), [result], over)
        graph.drop(*spent)
        return result

    graph.scope("aten::rms_norm")
    wide = graph.copy_as(x, "float32")
    squares = run("pow", wide)
    scale = run("rsqrt", run("mean", squares, to=each, spent=[squares]), to=each)
    scaled = graph.move_as(run("mul", wide, scale), dtype)
    result = run("mul", scaled, weight, dtype=dtype)

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        if graph.wants(weight):
            product = run("mul", grad, scaled, dtype=dtype)
            summed = graph.new(width, dtype=dtype)
            graph.op("aten::sum", [("self", product)], [summed], [("dim", (0,)), ("keepdim", False)])
            graph.drop(product)
            graph.accumulate(weight, summed)
        above = graph.move_as(run("mul", grad, weight, dtype=dtype), "float32")
        by_scale = run("mul", above, wide)
        to_scale = run("sum", by_scale, to=each, spent=[by_scale])
        direct = run("mul", above, scale, spent=[above])
        spread = run("div", to_scale, spent=[to_scale])  # of the mean, over all elements again
        power = run("pow", wide)  # of the square: to the power of one, twice
        doubled = run("mul", power, spent=[power])
        through = run("mul", spread, doubled, spent=[spread, doubled])
        below = run("add", direct, through, spent=[direct, through])
        return [graph.move_as(below, x.spec.dtype)]

    kept = list({ref.storage: ref for ref in (wide, scale, scaled)}.values())
    graph.node("FusedRmsNormBackward0", [x], [result], kept, backward)
    graph.drop(*kept)
    return result


def write_residual_add(graph: Graph, x: Ref, branch: Ref) -> Ref:
    """The residual sum, with dropout on the branch where the style has it (in the same kernel where it is fused)."""
    if graph.style.dropout and graph.style.fused:
        return _write_dropout_add(graph, x, branch)
    if graph.style.dropout:
        branch = write_dropout(graph, branch)
    graph.scope("aten::add")
    total = graph.new(*x.shape, dtype=x.spec.dtype)
    graph.op("aten::add", [("self", x), ("other", branch)], [total], [("alpha", 1)], overload="Tensor")

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        return [grad, graph.copy_as(grad, branch.spec.dtype)]

    graph.node("AddBackward0", [x, branch], [total], [], backward)
    graph.drop(x, branch)
    return total


def _write_dropout_add(graph: Graph, x: Ref, branch: Ref) -> Ref:
    """Dropout and the residual sum in one kernel; backward, the branch's gradient is one more."""
    graph.scope("aten::add")
    total, mask = graph.new(*x.shape), graph.new(*x.shape, dtype="bool")
    graph.fused([x, branch], [total, mask])

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        below = graph.new(*x.shape)
        graph.fused([grad, mask], [below])
        return [grad, below]

    graph.node("AddBackward0", [x, branch], [total], [mask], backward)
    graph.drop(x, branch, mask)
    return total


def write_dropout(graph: Graph, x: Ref) -> Ref:
    """Dropout, which keeps its mask."""
    graph.scope("aten::dropout")
    dtype = x.spec.dtype
    result, mask = graph.new(*x.shape, dtype=dtype), graph.new(*x.shape, dtype="bool")
    graph.op("aten::native_dropout", [("input", x)], [result, mask], [("p", 0.1), ("train", True)])

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        below = graph.new(*x.shape, dtype=dtype)
        graph.op("aten::native_dropout_backward", [("grad_output", grad), ("mask", mask)], [below], [("scale", 1.1)])
        return [below]

    graph.node("NativeDropoutBackward0", [x], [result], [mask], backward)
    graph.drop(x, mask)
    return result


def write_gated_activation(graph: Graph, gate: Ref, up: Ref | None, width: int, activation: str) -> Ref:
    """The activation of one projection times another; `up` None: `gate` holds both side by side."""
    if graph.style.fused or up is None:
        return _write_fused_gate(graph, [gate] if up is None else [gate, up], gate.shape[0], width)
    name = "silu" if activation == "swiglu" else "gelu"
    active = write_activation(graph, gate, name)
    graph.scope("aten::mul")
    result = graph.new(*up.shape)
    graph.op("aten::mul", [("self", active), ("other", up)], [result], overload="Tensor")

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        first, second = graph.new(*up.shape), graph.new(*up.shape)
        graph.op("aten::mul", [("self", grad), ("other", up)], [first], overload="Tensor")
        graph.op("aten::mul", [("self", grad), ("other", active)], [second], overload="Tensor")
        return [first, second]

    graph.node("MulBackward0", [active, up], [result], [active, up], backward)
    graph.drop(active, up)
    return result


def _write_fused_gate(graph: Graph, halves: list[Ref], rows: int, width: int) -> Ref:
    graph.scope("aten::mul")
    result = graph.new(rows, width)
    graph.fused(halves, [result])

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        below = [graph.new(*half.shape) for half in halves]
        graph.fused([grad, *halves], below)
        return below

    graph.node("MulBackward0", halves, [result], halves, backward)
    graph.drop(*halves)
    return result


def write_activation(graph: Graph, x: Ref, name: str) -> Ref:
    """An activation function: gelu, silu or relu."""
    graph.scope(f"aten::{name}")
    result = graph.new(*x.shape)
    graph.op(f"aten::{name}", [("self", x)], [result])

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        below = graph.new(*x.shape)
        named = "threshold_backward" if name == "relu" else f"{name}_backward"
        graph.op(f"aten::{named}", [("grad_output", grad), ("self", x)], [below])
        return [below]

    graph.node(f"{name.capitalize()}Backward0", [x], [result], [x], backward)
    graph.drop(x)
    return result


def write_gelu_by_ops(graph: Graph, x: Ref) -> Ref:
    """GELU by its tanh formula, a kernel for each step of arithmetic (Hugging Face's "gelu_new"). Autocast raises to
    powers in fp32, and what follows stays there."""
    narrow, wide = x.spec.dtype, graph.style.stream

    def run(op: str, *inputs: Ref, dtype: str = wide, spent: Sequence[Ref] = (), node: str = "") -> Ref:
        """An op of a scope of its own (`node` ""), of a node that it begins, or ("same") of the node before."""
        if node != "same":
            graph.builder.open_scope(node or f"aten::{op}", Phase.BACKWARD if node else Phase.FORWARD)
        result = graph.new(*x.shape, dtype=dtype)
        names = ("grad_output", "output") if op == "tanh_backward" else ("self", "other")
        graph.op(f"aten::{op}", list(zip(names, inputs, strict=False)), [result])
        graph.drop(*spent)
        return result

    half = run("mul", x, dtype=narrow)
    powered = graph.copy_as(x, wide)
    cube = run("pow", powered)
    scaled = run("mul", cube, spent=[cube])
    inner = run("add", x, scaled, spent=[scaled])
    turned = run("mul", inner, spent=[inner])
    curved = run("tanh", turned, spent=[turned])
    raised = run("add", curved)
    result = run("mul", half, raised)

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        again = partial(run, node="same")
        to_raised = again("mul", grad, half)
        to_half = graph.move_as(again("mul", grad, raised), narrow)
        graph.add_host_ops("AddBackward0")
        to_tanh = run("tanh_backward", to_raised, curved, spent=[to_raised], node="TanhBackward0")
        to_inner = run("mul", to_tanh, spent=[to_tanh], node="MulBackward0")
        graph.add_host_ops("AddBackward0")
        to_cube = run("mul", to_inner, node="MulBackward0")
        square = run("pow", powered, node="PowBackward0")
        slope = again("mul", square, spent=[square])
        product = again("mul", to_cube, slope, spent=[to_cube, slope])
        graph.builder.open_scope("ToCopyBackward0", Phase.BACKWARD)
        through, below = graph.move_as(product, narrow), graph.move_as(to_inner, narrow)
        for part in (through, run("mul", to_half, dtype=narrow, spent=[to_half], node="MulBackward0")):
            graph.op("aten::add_", [("self", below), ("other", part)], [below], [("alpha", 1)], overload="Tensor")
            graph.drop(part)
        return [below]

    kept = list({ref.storage: ref for ref in (x, powered, half, curved, raised)}.values())
    graph.node("MulBackward0", [x], [result], kept, backward)
    graph.drop(*kept)
    return result


def write_rotary(graph: Graph, x: Ref, width: int) -> Ref:
    """Rotary positions of heads side by side, [rows, heads * width]: a product of complex numbers in fp32."""
    rows, whole = x.shape
    if graph.style.fused:
        return _write_streaming_kernel(graph, x, "RotaryBackward")
    table = graph.builder.add_resident_tensor((rows, width // 2), _BUFFER, "complex64")

    def turned(source: Ref) -> Ref:
        wide, spun = graph.new(rows, whole, dtype="float32"), graph.new(rows, whole // 2, dtype="complex64")
        scalars: Scalars = [("dtype", "float32"), ("non_blocking", False), ("memory_format", None)]
        graph.op("aten::_to_copy", [("self", source)], [wide], scalars)
        graph.op("aten::mul", [("self", wide), ("other", table)], [spun], overload="Tensor")
        narrow = graph.new(rows, whole)
        graph.op("aten::_to_copy", [("self", spun)], [narrow], [("dtype", graph.style.element)])
        graph.drop(wide, spun)
        return narrow

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        return [turned(grad)]

    graph.scope("aten::mul")
    result = turned(x)
    graph.node("MulBackward0", [x], [result], [], backward)
    graph.drop(x)
    return result


def _write_streaming_kernel(graph: Graph, x: Ref, node: str) -> Ref:
    """One kernel that reads a tensor and writes another of the same form, and the like backward."""
    graph.scope(node)
    result = graph.new(*x.shape)
    graph.fused([x], [result])

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        below = graph.new(*x.shape)
        graph.fused([grad], [below])
        return [below]

    graph.node(node, [x], [result], [], backward)
    graph.drop(x)
    return result
