"""What is measured: shapes drawn in log space per kind of op, seeded, the same for the same seed.

Sizes are powers of two times 1, 1.25, 1.5 or 1.75, and now and then an odd one, since kernels work in tiles. Every
kind is drawn in turn, so that a short budget still sees all of them; and so is the state that a call finds its
operands in: how many bytes of other data were touched since they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np

from traincast.calibration.bench import signatures
from traincast.calibration.bench.signatures import MOST_FLOPS, Random, draw_size, make_op, make_spec
from traincast.ir.ops import Scalar, Signature, TensorSpec

_MOST_BYTES = 96 << 20  # of one call's operands
_TABLE_BYTES = 256 << 20
_TINY_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Task:
    """One microbenchmark: an op, the bytes of other data touched between two calls on the same operands (0: none, they
    are as warm as they can be), whether the op's own code was used before that data or after it, and which rows of a
    table its lookups want."""

    signature: Signature
    between: int
    code_far: bool = False
    access: str = ""


def _draw_gemm(random: Random) -> Signature:
    while True:
        sizes = [draw_size(random, 16, 8192), draw_size(random, 16, 4096), draw_size(random, 16, 8192)]
        if random.random() < 0.3:  # a small batch, a single output: often 1
            sizes[int(random.integers(3))] = 1 if random.random() < 0.5 else draw_size(random, 2, 16)
        m, n, k = sizes
        if 1e4 < 2.0 * m * n * k < MOST_FLOPS:
            break
    form = random.integers(4)
    if form == 0:  # a linear layer: its weight is kept transposed
        tensors = [("self", make_spec(n)), ("mat1", make_spec(m, k)), ("mat2", make_spec(k, n, transposed=True))]
        return make_op("addmm", tensors, [make_spec(m, n)], beta=1, alpha=1)
    left, right = make_spec(m, k, transposed=form == 2), make_spec(k, n, transposed=form == 3)
    return make_op("mm", [("self", left), ("mat2", right)], [make_spec(m, n)])


def _draw_bmm(random: Random) -> Signature:
    while True:
        batch, m, n = draw_size(random, 4, 4096), draw_size(random, 4, 256), draw_size(random, 4, 256)
        k = draw_size(random, 4, 256)
        if 1e4 < 2.0 * batch * m * n * k < MOST_FLOPS and batch * (m * k + k * n + m * n) < 1 << 24:
            break
    left, right = (
        make_spec(batch, m, k, transposed=random.random() < 0.25),
        make_spec(batch, k, n, transposed=random.random() < 0.4),
    )
    return make_op("bmm", [("self", left), ("mat2", right)], [make_spec(batch, m, n)])


def _draw_table(random: Random) -> tuple[int, int, int, int]:
    """(rows, dim, bags, lookups of a bag)"""
    while True:
        dim = int(random.choice([8, 16, 32, 64, 64, 128, 128, 256]))
        rows, bags, pooling = draw_size(random, 300, 2e6), draw_size(random, 64, 2048), draw_size(random, 1, 128)
        if rows * dim * 4 < _TABLE_BYTES and bags * pooling >= 256 and bags * pooling * dim * 4 < 2 * _MOST_BYTES / 3:
            return rows, dim, bags, pooling


def _draw_bag(random: Random) -> Signature:
    rows, dim, bags, pooling = _draw_table(random)
    lookups = bags * pooling
    index = str(random.choice(["int32", "int64"]))
    outputs = [
        make_spec(bags, dim),
        make_spec(0, dtype=index),
        make_spec(bags, dtype=index),
        make_spec(bags, dtype=index),
    ]
    tensors = [
        ("weight", make_spec(rows, dim)),
        ("indices", make_spec(lookups, dtype=index)),
        ("offsets", make_spec(bags, dtype=index)),
    ]
    return make_op("_embedding_bag", tensors, outputs, scale_grad_by_freq=False, mode=0, sparse=True,
              per_sample_weights=None, include_last_offset=False, padding_idx=-1)  # fmt: skip


def _draw_bag_backward(random: Random) -> Signature:
    rows, dim, bags, pooling = _draw_table(random)
    lookups = bags * pooling
    tensors = [
        ("grad", make_spec(bags, dim)),
        ("indices", make_spec(lookups, dtype="int64")),
        ("offsets", make_spec(bags, dtype="int64")),
        ("offset2bag", make_spec(lookups, dtype="int64")),
        ("bag_size", make_spec(bags, dtype="int64")),
        ("maximum_indices", make_spec(bags, dtype="int64")),
    ]
    return make_op("_embedding_bag_backward", tensors, [make_spec(1, lookups, dtype="int64"), make_spec(lookups, dim)],
              num_weights=rows, scale_grad_by_freq=False, mode=0, sparse=True, per_sample_weights=None,
              padding_idx=-1)  # fmt: skip


def _draw_sparse_update(random: Random) -> Signature:
    rows, dim, bags, pooling = _draw_table(random)
    lookups = bags * pooling
    inputs = (make_spec(rows, dim), make_spec(1, lookups, dtype="int64"), make_spec(lookups, dim))
    scalars = (("other_layout", "sparse_coo"), ("alpha", -0.01))
    return Signature("aten::add_", inputs, inputs[:1], scalars, (("self", 1), ("other", 2)), "Tensor")


def _draw_sparse_add(random: Random) -> Signature:
    _, dim, bags, pooling = _draw_table(random)
    lookups = bags * pooling
    empty, added = (
        (make_spec(1, 0, dtype="int64"), make_spec(0, dim)),
        (make_spec(1, lookups, dtype="int64"), make_spec(lookups, dim)),
    )
    scalars = (("self_layout", "sparse_coo"), ("other_layout", "sparse_coo"), ("alpha", 1))
    return Signature("aten::add", (*empty, *added), added, scalars, (("self", 2), ("other", 2)), "Tensor")


def _draw_embedding(random: Random) -> Signature:
    rows, dim, lookups = draw_size(random, 1000, 60_000), draw_size(random, 128, 1024), draw_size(random, 64, 8192)
    tensors = [("weight", make_spec(rows, dim)), ("indices", make_spec(lookups, dtype="int64"))]
    return make_op("embedding", tensors, [make_spec(lookups, dim)])


def _draw_embedding_backward(random: Random) -> Signature:
    rows, dim, lookups = draw_size(random, 1000, 30_000), draw_size(random, 128, 1024), draw_size(random, 64, 8192)
    tensors = [("grad_output", make_spec(lookups, dim)), ("indices", make_spec(lookups, dtype="int64"))]
    return make_op("embedding_dense_backward", tensors, [make_spec(rows, dim)], num_weights=rows, padding_idx=-1,
              scale_grad_by_freq=False)  # fmt: skip


def _draw_matrix(random: Random, most: float = 8e6) -> tuple[int, int]:
    """Rows and columns; now and then a few numbers only, as biases and counts of steps are."""
    if random.random() < _TINY_SHARE:
        return 1, draw_size(random, 1, 64)
    while True:
        rows, width = draw_size(random, 1, 16384), draw_size(random, 1, 8192)
        if 64 <= rows * width <= most:
            return rows, width


def _make_binary_drawer(name: str, overload: str = "Tensor", **scalars: Scalar) -> Callable[[Random], Signature]:
    def make(random: Random) -> Signature:
        shape = _draw_matrix(random)
        flip = name == "add" and random.random() < 0.2
        tensors = [("self", make_spec(*shape)), ("other", make_spec(*shape, transposed=flip))]
        return make_op(name, tensors, [make_spec(*shape)], overload, **scalars)

    return make


def _make_unary_drawer(name: str, overload: str = "", **scalars: Scalar) -> Callable[[Random], Signature]:
    def make(random: Random) -> Signature:
        shape = _draw_matrix(random)
        return make_op(name, [("self", make_spec(*shape))], [make_spec(*shape)], overload, **scalars)

    return make


def _make_grad_drawer(name: str, second: str, **scalars: Scalar) -> Callable[[Random], Signature]:
    def make(random: Random) -> Signature:
        shape = _draw_matrix(random)
        return make_op(
            name, [("grad_output", make_spec(*shape)), (second, make_spec(*shape))], [make_spec(*shape)], "", **scalars
        )

    return make


def _make_ternary_drawer(name: str, first: str, second: str, **scalars: Scalar) -> Callable[[Random], Signature]:
    def make(random: Random) -> Signature:
        shape = _draw_matrix(random)
        tensors = [("self", make_spec(*shape)), (first, make_spec(*shape)), (second, make_spec(*shape))]
        return make_op(name, tensors, [make_spec(*shape)], "", **scalars)

    return make


def _draw_lerp(random: Random) -> Signature:
    shape = _draw_matrix(random)
    return make_op(
        "lerp_", [("self", make_spec(*shape)), ("end", make_spec(*shape))], [make_spec(*shape)], "Scalar", weight=0.1
    )


def _draw_copy(random: Random) -> Signature:
    rows, width = _draw_matrix(random)
    form = random.integers(3)
    if form == 2:  # heads behind positions: pieces of rows
        heads = draw_size(random, 2, 16)
        rows = max(rows // heads, 1)
        laid = TensorSpec((heads, rows, width), (width, heads * width, 1), "float32")
        made = make_spec(heads, rows, width)
    else:
        laid, made = make_spec(rows, width, transposed=form == 1), make_spec(rows, width)
    return make_op("clone", [("self", laid)], [made], memory_format="contiguous_format")


def _draw_cat(random: Random) -> Signature:
    rows, blocks = draw_size(random, 32, 8192), draw_size(random, 2, 64)
    width = int(min(draw_size(random, 4, 512), max(4e6 // (rows * blocks), 1)))
    made = (make_spec(rows, width),) * blocks
    return Signature("aten::cat", made, (make_spec(rows, width * blocks),), (("dim", 1),), (("tensors", blocks),))


def _draw_sum(random: Random) -> Signature:
    rows, width = _draw_matrix(random)
    dim = int(random.choice([0, 0, 1]))
    return make_op(
        "sum",
        [("self", make_spec(rows, width))],
        [make_spec(*((1, width) if dim == 0 else (rows, 1)))],
        "dim_IntList",
        dim=(dim,),
        keepdim=True,
    )


def _draw_mean(random: Random) -> Signature:
    return make_op("mean", [("self", make_spec(*_draw_matrix(random)))], [make_spec()], "", dtype=None)


def _make_softmax_drawer(name: str, backward: bool = False) -> Callable[[Random], Signature]:
    def make(random: Random) -> Signature:
        rows, width = _draw_matrix(random, 4e6)
        shape = make_spec(rows, width)
        if backward:
            return make_op(name, [("grad_output", shape), ("output", shape)], [shape], dim=-1, input_dtype="float32")
        return make_op(name, [("self", shape)], [shape], dim=-1, half_to_float=False)

    return make


def _draw_layer_norm(random: Random) -> Signature:
    rows, width = draw_size(random, 16, 8192), draw_size(random, 64, 2048)
    tensors = [("input", make_spec(rows, width)), ("weight", make_spec(width)), ("bias", make_spec(width))]
    return make_op("native_layer_norm", tensors, [make_spec(rows, width), make_spec(rows, 1), make_spec(rows, 1)],
              normalized_shape=(width,), eps=1e-5)  # fmt: skip


def _draw_layer_norm_backward(random: Random) -> Signature:
    rows, width = draw_size(random, 16, 8192), draw_size(random, 64, 2048)
    tensors = [("grad_out", make_spec(rows, width)), ("input", make_spec(rows, width)), ("mean", make_spec(rows, 1)),
               ("rstd", make_spec(rows, 1)), ("weight", make_spec(width)), ("bias", make_spec(width))]  # fmt: skip
    return make_op("native_layer_norm_backward", tensors, [make_spec(rows, width), make_spec(width), make_spec(width)],
              normalized_shape=(width,), output_mask=(True, True, True))  # fmt: skip


def _draw_nll(random: Random, *, backward: bool = False) -> Signature:
    """The negative log likelihood of classes, or its gradient."""
    rows, classes = _draw_matrix(random, 4e6)
    table, wanted, weight = make_spec(rows, classes), make_spec(rows, dtype="int64"), make_spec()
    scalars: dict[str, Scalar] = {"weight": None, "reduction": 1, "ignore_index": -100}
    if not backward:
        return make_op("nll_loss_forward", [("self", table), ("target", wanted)], [weight, weight], "", **scalars)
    tensors = [("grad_output", weight), ("self", table), ("target", wanted), ("total_weight", weight)]
    return make_op("nll_loss_backward", tensors, [table], "", **scalars)


def _draw_binary_cross_entropy(random: Random, *, backward: bool = False) -> Signature:
    """Binary cross entropy of one output a sample, or its gradient."""
    samples = make_spec(draw_size(random, 32, 16384), 1)
    tensors = [("self", samples), ("target", samples)]
    if not backward:
        return make_op("binary_cross_entropy", tensors, [make_spec()], "", weight=None, reduction=1)
    return make_op(
        "binary_cross_entropy_backward",
        [("grad_output", make_spec()), *tensors],
        [samples],
        "",
        weight=None,
        reduction=1,
    )


def _draw_index(random: Random) -> Signature:
    batch, features = draw_size(random, 64, 4096), draw_size(random, 4, 40)
    pairs = max(features * (features - 1) // 2, 1)
    inputs = (make_spec(batch, features, features), make_spec(pairs, dtype="int64"), make_spec(pairs, dtype="int64"))
    return Signature("aten::index", inputs, (make_spec(batch, pairs),), (("indices_given", (False, True, True)),),
                     (("self", 1), ("indices", 2)), "Tensor")  # fmt: skip


def _draw_index_put(random: Random) -> Signature:
    read = _draw_index(random)
    inputs = (*read.inputs, *read.outputs)
    scalars: tuple[tuple[str, Scalar], ...] = (*read.scalars, ("accumulate", True), ("unsafe", False))
    groups = (("self", 1), ("indices", 2), ("values", 1))
    return Signature("aten::_index_put_impl_", inputs, inputs[:1], scalars, groups)


_COMMON: dict[str, tuple[int, Callable[[Random], Signature]]] = {
    "gemm": (16, _draw_gemm),
    "bmm": (6, _draw_bmm),
    "_embedding_bag": (7, _draw_bag),
    "_embedding_bag_backward": (6, _draw_bag_backward),
    "sparse_update": (7, _draw_sparse_update),
    "sparse_add": (2, _draw_sparse_add),
    "conv": (6, signatures.draw_conv),
    "conv_backward": (6, signatures.draw_conv_backward),
    "embedding": (2, _draw_embedding),
    "embedding_dense_backward": (1, _draw_embedding_backward),
    "add": (3, _make_binary_drawer("add", alpha=1)),
    "add_": (3, _make_binary_drawer("add_", alpha=-0.01)),
    "mul": (1, _make_binary_drawer("mul")),
    "mul_": (1, _make_unary_drawer("mul_", "Scalar", other=0.9)),
    "div": (1, _make_unary_drawer("div", "Scalar", other=1.5)),
    "relu": (2, _make_unary_drawer("relu")),
    "threshold_backward": (2, _make_grad_drawer("threshold_backward", "self", threshold=0)),
    "sigmoid": (1, _make_unary_drawer("sigmoid")),
    "sigmoid_backward": (1, _make_grad_drawer("sigmoid_backward", "output")),
    "tanh": (1, _make_unary_drawer("tanh")),
    "tanh_backward": (1, _make_grad_drawer("tanh_backward", "output")),
    "gelu": (1, _make_unary_drawer("gelu", approximate="none")),
    "gelu_backward": (1, _make_grad_drawer("gelu_backward", "self", approximate="none")),
    "sqrt": (1, _make_unary_drawer("sqrt")),
    "pow": (1, _make_unary_drawer("pow", "Tensor_Scalar", exponent=3)),
    "lerp": (1, _draw_lerp),
    "addcmul": (1, _make_ternary_drawer("addcmul_", "tensor1", "tensor2", value=0.1)),
    "addcdiv": (1, _make_ternary_drawer("addcdiv_", "tensor1", "tensor2", value=0.1)),
    "bernoulli": (1, _make_unary_drawer("bernoulli_", "float", p=0.9)),
    "fill": (2, _make_unary_drawer("zero_")),
    "copy": (2, _draw_copy),
    "cat": (2, _draw_cat),
    "sum": (2, _draw_sum),
    "mean": (1, _draw_mean),
    "_softmax": (1, _make_softmax_drawer("_softmax")),
    "_softmax_backward_data": (1, _make_softmax_drawer("_softmax_backward_data", backward=True)),
    "_log_softmax": (1, _make_softmax_drawer("_log_softmax")),
    "_log_softmax_backward_data": (1, _make_softmax_drawer("_log_softmax_backward_data", backward=True)),
    "nll_loss_forward": (1, _draw_nll),
    "nll_loss_backward": (1, partial(_draw_nll, backward=True)),
    "binary_cross_entropy": (1, _draw_binary_cross_entropy),
    "binary_cross_entropy_backward": (1, partial(_draw_binary_cross_entropy, backward=True)),
    "native_layer_norm": (1, _draw_layer_norm),
    "native_layer_norm_backward": (1, _draw_layer_norm_backward),
    "native_batch_norm": (1, signatures.draw_batch_norm),
    "native_batch_norm_backward": (1, signatures.draw_batch_norm_backward),
    "max_pool2d_with_indices": (1, signatures.draw_pool),
    "max_pool2d_with_indices_backward": (1, signatures.draw_pool_backward),
    "index": (1, _draw_index),
    "index_put": (1, _draw_index_put),
}
"""For each kind: how many samples it gets a round, and how one is drawn."""
KINDS = tuple(_COMMON)
_LAWS = ("", "", "zipf:0.6", "zipf:0.8", "zipf:1.0", "zipf:1.2")
FAR_BYTES = 64 << 20
"""Other data between two calls after which operands come from memory."""
_WARM_SHARE, _NEAR_BYTES = 0.2, 128 << 10  # no other data at all; the least, which an L2 holds


def _draw_state(random: Random) -> tuple[int, bool]:
    """Bytes between two calls, and whether the op's code is as far away."""
    if random.random() < _WARM_SHARE:
        return 0, False
    between = round(float(2.0 ** random.uniform(*np.log2((_NEAR_BYTES, FAR_BYTES)))))
    return between, bool(random.random() < 0.5)


def plan_benchmarks(seed: int = 0, kinds: tuple[str, ...] = KINDS) -> Iterator[Task]:
    """Microbenchmarks without end, round after round over the kinds; operands as near and as far as in steps."""
    for turn in count():
        for number, kind in enumerate(kinds):
            samples, draw = _COMMON[kind]
            random = np.random.default_rng((seed, turn, number))
            for _ in range(samples):
                signature = draw(random)
                lookup = "embedding_bag" in kind or kind == "sparse_update"
                yield Task(signature, *_draw_state(random), str(random.choice(_LAWS)) if lookup else "")
