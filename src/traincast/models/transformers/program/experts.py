"""The mixture of experts of a layer: routing, sorting tokens by expert, grouped GEMMs, and the way back."""

from __future__ import annotations

from traincast.ir.ops import GROUPED, GROUPED_NARROW, Phase
from traincast.models.layers.builder import Ref
from traincast.models.transformers.description import Experts, Transformer
from traincast.models.transformers.program.graph import Gradients, Graph
from traincast.models.transformers.program.parts import (
    write_activation,
    write_gated_activation,
    write_gelu_by_ops,
    write_linear,
    write_residual_add,
)
from traincast.models.transformers.program.style import Shard


def write_mixture_of_experts(graph: Graph, x: Ref, model: Transformer, shard: Shard) -> Ref:
    """From the normalised input, [rows, hidden], through the experts that each token is sent to.

    Every rank of the expert-parallel group receives as many tokens as it sends, the busiest `shard.imbalance` times as
    many.
    """
    experts = model.experts
    assert experts is not None
    rows = x.shape[0]
    best = _write_router(graph, x, experts)
    graph.module = "experts"
    inputs, sent_width = x, experts.latent or model.hidden
    if experts.latent:
        inputs = write_linear(graph, x, experts.latent)
    local = max(1, experts.count // shard.ep)
    sent = _count_sent_tokens(rows, experts)
    # an expert that several ranks share sees the tokens of all of them
    each = max(1, int(sent * shard.etp * shard.imbalance) // local)
    if graph.groups.counts_on_host and graph.groups.ep is not None:
        graph.wait_for_counts()
    sorted_tokens = _write_permutation(graph, inputs, (local * each, sent_width), "PermuteBackward")
    sorted_tokens = _send_to_experts(graph, sorted_tokens, rows, out=True)
    resorts = shard.ep > 1 and not graph.groups.sorted_by_dispatch
    if resorts:  # what has arrived is sorted once more, rank by rank to expert by expert
        sorted_tokens = _reorder_rows(graph, sorted_tokens)
    width = max(1, experts.ffn // shard.etp)
    hidden = _write_grouped_gemm(graph, sorted_tokens, local, width * (2 if model.gated else 1))
    graph.drop(sorted_tokens)
    by_ops = model.bias and graph.style.tuned and not graph.style.together
    if not model.gated:
        active = write_activation(graph, hidden, name_plain_activation(model))
    elif by_ops:
        active = _write_clamped_gate(graph, hidden, width)
    else:
        active = write_gated_activation(graph, hidden, None, width, model.activation)
    result = _write_grouped_gemm(graph, active, local, sent_width)
    graph.drop(active)
    if by_ops:
        result = _add_expert_biases(graph, result)
    if resorts:
        result = _reorder_rows(graph, result)
    result = _send_to_experts(graph, result, rows, out=False)
    mixed = _combine_expert_outputs(graph, result, best, rows)
    graph.drop(result)
    if experts.latent:
        mixed = write_linear(graph, mixed, model.hidden)
    if not experts.shared_ffn:
        return mixed
    return write_residual_add(graph, mixed, write_feed_forward(graph, x, model, experts.shared_ffn // shard.tp))


def _send_to_experts(graph: Graph, x: Ref, rows: int, *, out: bool) -> Ref:
    """Tokens on their way to the ranks of their experts (`out`), or back."""
    groups = graph.groups
    if groups.ep is None:
        return x
    # 16-bit both ways: Megatron casts tokens to eight bits where experts multiply them
    ways = [("all_to_all", 2 * rows * groups.dispatched * x.shape[1])] * 2
    if groups.overlap_ep:
        # they run beside kernels of another micro-batch: here, both beside those of the experts, which take as long
        return graph.communicated(x, groups.ep, ways if out else [], [] if out else ways, beside=True)
    way = ways[:1] if out else ways[1:]
    return graph.communicated(x, groups.ep, way, way, beside=False)


def _write_clamped_gate(graph: Graph, x: Ref, width: int) -> Ref:
    """GPT-OSS's gate in Megatron: both halves clamped, the gate's sigmoid, one added to the other half, their product
    and (in fp32) that with the token's share, each a kernel of its own."""
    rows = x.shape[0]
    graph.scope("aten::mul")
    first, second, wide = (graph.new(rows, width, dtype=dtype) for dtype in ("", "", "float32"))
    result = graph.new(rows, width)
    for half in (first, second):
        graph.fused([half], [half])  # clamped
        graph.fused([half], [half])  # the sigmoid of the one, one more than the other
    graph.fused([first, second], [result])
    graph.fused([result], [wide])
    graph.fused([wide], [result])

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        below, scaled = graph.new(*x.shape), graph.new(rows, width, dtype="float32")
        graph.fused([grad], [scaled])
        graph.fused([scaled], [scaled])  # times the share
        graph.fused([scaled, grad], [scaled])  # and what the share's own gradient sums up
        graph.fused([scaled], [])
        graph.fused([scaled], [grad])
        for half in (first, second):
            graph.fused([grad, half], [half])  # of the product,
            graph.fused([half, grad], [half])  # the sigmoid or the sum, and the clamp
        graph.fused([first, second], [below])
        graph.drop(scaled)
        return [below]

    graph.node("MulBackward0", [x], [result], [x, first, second], backward)
    graph.drop(x, wide, first, second)
    return result


def _add_expert_biases(graph: Graph, x: Ref) -> Ref:
    """Megatron adds an expert's bias, times the token's share, expert by expert in fp32, joins the parts and casts
    them; backward the sums of bias and share are as wide."""
    graph.scope("aten::add")
    result, wide, other = graph.new(*x.shape), *(graph.new(*x.shape, dtype="float32") for _ in range(2))
    graph.fused([], [wide])
    graph.fused([x, wide], [wide])
    graph.fused([wide], [other])
    graph.fused([other], [result])

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        scaled, sums, below = *(graph.new(*x.shape, dtype="float32") for _ in range(2)), graph.new(*x.shape)
        graph.fused([grad], [scaled])
        graph.fused([scaled], [below])
        for _ in range(2):  # of the bias, and of the share
            graph.fused([scaled], [sums])
            graph.fused([sums], [])
        graph.drop(scaled, sums)
        return [below]

    graph.node("AddBackward0", [x], [result], [], backward)
    graph.drop(x, wide, other)
    return result


def _count_sent_tokens(rows: int, experts: Experts) -> int:
    """Tokens that a rank sends to experts, those that overflow left out."""
    return rows * experts.top_k if not experts.capacity else int(rows * experts.top_k * min(1.0, experts.capacity))


def _write_router(graph: Graph, x: Ref, experts: Experts) -> Ref:
    """The router: one small product, a softmax and the largest few of every row, [rows, top_k]; and their way back."""
    rows, count = x.shape[0], experts.count
    scores = write_linear(graph, x, count)
    graph.scope("aten::softmax")
    shares = graph.new(rows, count, dtype="float32")
    graph.op("aten::_softmax", [("self", scores)], [shares], [("dim", -1), ("half_to_float", True)])

    def softmax_backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        below = graph.new(rows, count)
        graph.op("aten::_softmax_backward_data", [("grad_output", grad), ("output", shares)], [below], [("dim", -1)])
        return [below]

    graph.node("SoftmaxBackward0", [scores], [shares], [shares], softmax_backward)
    graph.scope("aten::topk")
    best = graph.new(rows, experts.top_k, dtype="float32")
    where = graph.new(rows, experts.top_k, dtype="int64")
    graph.op("aten::topk", [("self", shares)], [best, where], [("k", experts.top_k), ("dim", -1)])

    def topk_backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        below = graph.new(rows, count, dtype="float32")
        graph.fused([grad, where], [below])
        return [below]

    graph.node("TopkBackward0", [shares], [best], [where], topk_backward)
    graph.drop(scores, shares, where)
    return best


def _combine_expert_outputs(graph: Graph, x: Ref, best: Ref, rows: int) -> Ref:
    """What experts made of a token, weighted by their shares and summed: one kernel each way. DeepEP only sums: shares
    have been multiplied in with the activation, and backward does not read what experts made."""
    result, summed = graph.new(rows, x.shape[1]), graph.groups.sorted_by_dispatch
    graph.scope("UnpermuteBackward")
    graph.fused([x] if summed else [x, best], [result])

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        below, shares = graph.new(*x.shape), graph.new(*best.shape, dtype="float32")
        graph.fused([grad] if summed else [grad, x, best], [below, shares])
        return [below, shares]

    graph.node("UnpermuteBackward", [x, best], [result], [] if summed else [x, best], backward)
    graph.drop(best)
    return result


def _write_permutation(graph: Graph, x: Ref, shape: tuple[int, int], node: str) -> Ref:
    """Rows copied into another order, or summed from it: one kernel each way."""
    before = x.shape
    graph.scope(node)
    result = graph.new(*shape)
    graph.fused([x], [result])

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        below = graph.new(*before)
        graph.fused([grad], [below])
        return [below]

    graph.node(node, [x], [result], [], backward)
    return result


def _reorder_rows(graph: Graph, x: Ref) -> Ref:
    """All rows in another order; the old order is not wanted again."""
    rows, width = x.shape
    result = _write_permutation(graph, x, (rows, width), "SortChunksBackward")
    graph.drop(x)
    return result


def _write_grouped_gemm(graph: Graph, x: Ref, groups: int, fan_out: int) -> Ref:
    """Each group of rows times the matrix of its expert: one grouped product, and two backward."""
    (total, fan_in), builder = x.shape, graph.builder
    rows, grouped = total // groups, graph.variant(GROUPED_NARROW if graph.style.narrow else GROUPED)
    weight = graph.weight(groups, fan_in, fan_out)
    graph.add_calls_of_experts(groups)
    graph.scope("aten::_grouped_mm")
    result = graph.new(total, fan_out)
    stacked, output = builder.add_view(x, (groups, rows, fan_in)), builder.add_view(result, (groups, rows, fan_out))
    graph.op("aten::bmm", [("self", stacked), ("mat2", weight)], [output], grouped)

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        if graph.add_calls_of_experts(2 * groups, Phase.BACKWARD):
            builder.open_scope("GroupedMmBackward0", Phase.BACKWARD)
        outer = builder.add_view(grad, (groups, rows, fan_out))
        below = graph.new(total, fan_in)
        turned = builder.add_view(weight, (groups, fan_out, fan_in), (fan_in * fan_out, 1, fan_out))
        graph.op(
            "aten::bmm", [("self", outer), ("mat2", turned)], [builder.add_view(below, (groups, rows, fan_in))], grouped
        )
        if graph.wants(weight):
            update = graph.new(groups, fan_in, fan_out)
            flipped = builder.add_view(x, (groups, fan_in, rows), (rows * fan_in, 1, fan_in))
            graph.op("aten::bmm", [("self", flipped), ("mat2", outer)], [update], grouped)
            graph.accumulate(weight, update)
        return [below]

    graph.node("GroupedMmBackward0", [x], [result], [x], backward)
    return result


def name_plain_activation(model: Transformer) -> str:
    """The op of an activation that is not gated; a squared one is a kernel of the same traffic."""
    return "relu" if model.activation.startswith("relu") else "gelu"


def write_feed_forward(graph: Graph, x: Ref, model: Transformer, width: int) -> Ref:
    """A dense feed-forward network of this width on this rank."""
    adapted = graph.style.adapts_all
    if not model.gated:
        hidden = write_linear(graph, x, width, bias=model.bias, adapted=adapted)
        by_ops = model.activation == "gelu_new" and not graph.style.fused
        active = (
            write_gelu_by_ops(graph, hidden)
            if by_ops
            else write_activation(graph, hidden, name_plain_activation(model))
        )
    elif graph.style.joined or model.joined:
        active = write_gated_activation(
            graph, write_linear(graph, x, 2 * width, bias=model.bias, adapted=adapted), None, width, model.activation
        )
    else:
        gate, up = (write_linear(graph, x, width, bias=model.bias, adapted=adapted) for _ in range(2))
        active = write_gated_activation(graph, gate, up, width, model.activation)
    result = write_linear(graph, active, model.hidden, bias=model.bias, adapted=adapted)
    graph.drop(active)
    return result
