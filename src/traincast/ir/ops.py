"""What a workload is made of, one object at a time (tensors, op signatures, ops, host scopes), and words and lists of
ops that others share.

An op whose signature has the scalar `variant` runs that implementation of its kernels: one or more of these words,
separated by spaces. Costs that differ by implementation stand in `traincast.costs.in_step`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

Scalar: TypeAlias = "None | bool | int | float | str | tuple[Scalar, ...]"

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float4_e2m1fn_x2": 1,  # a byte per element: tensors of it are short-lived copies, GEMMs count 4 bits and scales
    "int64": 8, "uint64": 8, "uint32": 4, "uint16": 2, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "complex64": 8, "complex128": 16,
}  # fmt: skip

DEVICES = ("cuda", "cpu", "cpu:pinned")
ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"
"""The scope in which autograd keeps the gradient of a parameter."""


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def find_layer(path: str) -> str:
    """The layer that a module belongs to: its path up to the first number, else its first two names.

    >>> layer_of("Bert.encoder.layers.3.mlp.fc1"), layer_of("Bert.embeddings.word.table")
    ('Bert.encoder.layers.3', 'Bert.embeddings')
    """
    number = _NUMBER.search(path)
    return path[: number.end()] if number else ".".join(path.split(".")[:2])


class Phase(IntEnum):
    """Which part of the training step an op belongs to."""

    INPUT = 0
    FORWARD = 1
    LOSS = 2
    BACKWARD = 3
    OPTIMIZER = 4
    OTHER = 5


class StorageKind(IntEnum):
    """What a storage holds, for the memory breakdown."""

    PARAMETER = 0
    GRADIENT = 1
    OPTIMIZER_STATE = 2
    INPUT = 3
    ACTIVATION = 4
    BUFFER = 5


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's form without its identity. `shape` and `stride` count elements; `numel` is how many there are."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str = "cuda"
    numel: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", math.prod(self.shape))

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements (not of the storage behind them)."""
        return self.numel * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are in row-major order without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True, slots=True)
class Signature:
    """An op without the identity of its tensors: equal signatures run the same kernels.

    `name` is the dispatcher's name with its namespace, e.g. `aten::addmm`; `overload` e.g. `out`.
    `scalars` are the non-tensor arguments by name, in order. A `Tensor[]` argument is flattened into
    `inputs`; `groups` gives, per tensor argument in schema order, (argument name, number of tensors).
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    scalars: tuple[tuple[str, Scalar], ...] = ()
    groups: tuple[tuple[str, int], ...] = ()
    overload: str = ""

    def scalar(self, name: str, default: Scalar = None) -> Scalar:
        """The scalar argument of this name, or `default` when the op has none."""
        for key, value in self.scalars:
            if key == name:
                return value
        return default

    def tensors(self, argument: str) -> tuple[TensorSpec, ...]:
        """The tensors passed as this argument (empty when absent or None)."""
        return next((self.inputs[span] for name, span in self.spans() if name == argument), ())

    def spans(self) -> Iterator[tuple[str, slice]]:
        """Every tensor argument with its places among `inputs`."""
        start = 0
        for name, count in self.groups:
            yield name, slice(start, start + count)
            start += count


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of one program: `id` is unique per tensor, `storage` is shared by its views."""

    id: int
    storage: int
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class Op:
    """One op of a program, in host order.

    `scope` indexes the top-level host op it runs under (`aten::linear`, `AddmmBackward0`,
    `Optimizer.step#SGD.step`), `forward` is the index of the forward op whose gradient this is (or -1),
    `thread` and `stream` say where it is issued and where its kernels run.
    """

    index: int
    signature: Signature
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    phase: Phase
    module: str
    scope: int
    forward: int
    thread: int
    stream: int

    @property
    def name(self) -> str:
        """The dispatcher's name, e.g. `aten::addmm`."""
        return self.signature.name


@dataclass(frozen=True, slots=True)
class Scope:
    """A top-level host op: what the five host overheads are attached to. It may hold no op at all.

    `after` is the index of a scope on another thread that must have returned first, or -1.
    """

    index: int
    name: str
    phase: Phase
    thread: int
    after: int
    first_op: int
    num_ops: int


VARIANT = "variant"
"""The scalar of a signature."""

GROUPED = "grouped"
"""A GEMM per expert in one kernel, of an expert's own number of rows each."""
GROUPED_NARROW = "grouped_8bit"
"""Likewise in eight bits; the op itself is written in 16, in which alone batched GEMMs were measured."""
BATCHED = "batched"
"""Batched GEMMs of attention that is written out, by a vendor's library that was tuned for them."""
ROWWISE = "rowwise"
"""An 8-bit GEMM with a scale for every row."""
TUNED = "tuned"
"""A GEMM whose kernel a vendor or a submission chose for this size."""
TRITON, FLASH2 = "triton", "flash2"
"""Attention by Triton's first kernel, or by the second version of flash attention."""
RING = "ring"
"""Attention in parts whose results are merged in fp32 (PyTorch's context parallelism)."""
POINTWISE, POINTWISE_BACKWARD = "fbgemm::hstu_varlen_fwd", "fbgemm::hstu_varlen_bwd"
"""HSTU's attention over sequences laid end to end, as its library's ops are called on one generation of GPUs each."""
EFFECTIVE_LENGTH = "effective_length"
"""Of such an op: the length of as many equal sequences that have as many pairs."""
NARROW_LOADS = "narrow_loads"
"""An element-wise kernel that loads 16-bit values one by one."""
UNIFORM = "uniform"
"""A collective whose `group` stands for many that are formed like it: every rank that runs the program calls it in a
group of its own, and all ranks of that group run the same program."""
BETWEEN_STAGES = "stages"
"""A message from every rank that runs one program to its counterpart that runs another one; `source` and `target` are
the first of them."""
EXPOSED = "exposed"
"""A collective that nothing can run alongside: the kernels after it wait."""

DISPATCH_SCOPE = "moe::dispatch"
"""The host op that stands for the Python of one call in a mixture's token dispatcher, where token counts reach the host
and decide sizes."""
MODULE_SCOPE = "torch.nn.Module._call_impl"
"""The host op that stands for the Python of one module call in programs that are written from a description."""
TIMES = " x "
"""Between the name of a host op and how often it runs in a row."""


LOWER_PRECISION = (
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul",
    "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
)  # fmt: skip
FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity",
    "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss",
    "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm",
    "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d",
    "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
    "linalg_matrix_sqrth",  # since 2.14
)  # fmt: skip
FLOAT32_RESULT = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip
NORMS = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
)  # fmt: skip
BANNED = "binary_cross_entropy"
RECURRENT = ("_cudnn_rnn",)
"""cuDNN's layers; a CPU build has no autocast kernel of theirs to compare with."""
