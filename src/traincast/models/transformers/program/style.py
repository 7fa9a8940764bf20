"""What one rank computes of a layer, how a framework runs it, and the collectives inside a layer.

All ranks of such a group run the same program, so that a collective carries the shape of its group (`UNIFORM`): the
ranks of one group, which stand for all others that are formed like it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from traincast.ir.collectives import COLLECTIVES
from traincast.ir.ops import EXPOSED, UNIFORM, VARIANT
from traincast.models.layers.builder import Communicator, Ref, Scalars, StepBuilder


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroups:
    """Rank groups of a layer and how their collectives run; None: no such group.

    `overlap_tp` is "none", "backward" (alongside the GEMMs of gradients, as Megatron does) or "all" (also in the
    forward pass, of each collective the share `hidden_tp`). `token_bytes` is the size of an element that
    tensor-parallel ranks gather. `cp_gather`: keys and values are gathered, not sent round a ring. `dispatched` is how
    many copies of a token leave for experts; `overlap_ep`: alongside other kernels; `sorted_by_dispatch`: they arrive
    in the order of experts; `counts_on_host`: the host waits for the token counts of experts. `in_graph`: one CUDA
    graph launches them, and no host lets its rank come late.
    """

    tp: Communicator | None = None
    cp: Communicator | None = None
    ep: Communicator | None = None
    overlap_tp: str = "none"
    hidden_tp: float = 0.0
    token_bytes: int = 2
    cp_gather: bool = False
    dispatched: float = 0.0
    overlap_ep: bool = False
    sorted_by_dispatch: bool = False
    counts_on_host: bool = False
    in_graph: bool = False


@dataclass(slots=True)
class Region:
    """What runs on all tokens of a micro-batch, between two tensor-parallel collectives.

    `late` writes the gradients of its weights, which run alongside the collective of the gradient of its input.
    """

    regather: Callable[[], None] | None = None
    late: list[Callable[[], None]] = field(default_factory=list)


def write_collective(
    builder: StepBuilder,
    kind: str,
    group: Communicator,
    nbytes: float,
    ref: Ref,
    *,
    stream: int = 0,
    exposed: bool = False,
    module: str = "",
) -> None:
    """A collective on a stream of its own choice; `exposed`: nothing can run alongside it."""
    record = COLLECTIVES[kind]
    scalars: Scalars = [
        ("collective", kind), ("group", group.ranks), ("communicator", group.number), ("bytes", int(nbytes)),
        (VARIANT, f"{UNIFORM} {EXPOSED}" if exposed else UNIFORM),
    ]  # fmt: skip
    builder.add_op(f"c10d::{record.ops[0]}", [("tensors", ref)], [ref], scalars, stream=stream, module=module)


def begin_collective(
    builder: StepBuilder, kind: str, group: Communicator, nbytes: float, ref: Ref, *, module: str = ""
) -> int:
    """A collective on its communicator's stream (numbered as the communicator), after what the compute stream has so
    far; gives the event of its end."""
    stream = group.number
    builder.wait_for_event(builder.record_event(0), stream)
    write_collective(builder, kind, group, nbytes, ref, stream=stream, module=module)
    return builder.record_event(stream)


ELEMENT_TYPES = {
    "fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "bfloat16", "fp4": "bfloat16",
}  # fmt: skip
"""The type of activations, by the arithmetic of GEMMs."""
NARROW_TYPES = {"fp8": "float8_e4m3fn", "fp4": "float4_e2m1fn_x2"}
"""The type of operands that are scaled copies of activations and weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """How a framework runs a layer.

    `precision` is the arithmetic of its GEMMs. `attention` is "flash", one of its older kernels ("flash2",
    "triton") or "unfused" (scores are written out, as before 2022); `ring`: its parts are merged in fp32. `tuned`: a
    vendor chose the kernels of GEMMs. `fused`: element-wise runs are one kernel each (a compiler's, or a vendor's),
    which are launched `together`, without a host op for each, by a compiler or a CUDA graph; those of the modules in
    `graphed` as a CUDA graph of that module. `joined`: query, key and
    value are one product, and so are gate and up (Megatron, MPT; not torchtitan). `dropout`: after attention and both
    projections. `accumulate` is how a gradient joins that of the micro-batch before: "first" (there is none), "add" (a
    kernel of its own) or "epilogue" (in the product; in fp32 with `exact_gradients`).

    `quantised_weights`: 8-bit copies of weights are made anew for every micro-batch. `wide_gradients`: gradients of
    weights are 16-bit GEMMs. `autocast`: weights are in fp32 and cast for every product; `wide`: as PyTorch's autocast
    does it, with norms and the residual stream in fp32, and casts between them and GEMMs. `compiled_loss`: the loss
    is fused but keeps fp32 copies of logits and of their gradients; `loss_by_ops`: it is Megatron's, op by op.
    `scaling`: where an 8-bit scale belongs to a "block" along the contraction (also "mx"), what a product contracts
    over tokens is cast once more; 4-bit operands (NVFP4, MXFP4) always have blocks. `frozen`: weights get no gradient;
    low-rank adapters of rank `adapter_rank` alongside those of attention, or (`adapts_all`) of all projections, do.
    """

    precision: str = "bf16"
    attention: str = "flash"
    fused: bool = False
    together: bool = False
    graphed: tuple[str, ...] = ()
    joined: bool = True
    dropout: bool = False
    accumulate: str = "first"
    exact_gradients: bool = True
    scaling: str = "tensor"
    quantised_weights: bool = False
    wide_gradients: bool = False
    autocast: bool = False
    wide: bool = False
    compiled_loss: bool = False
    loss_by_ops: bool = False
    ring: bool = False
    tuned: bool = False
    frozen: bool = False
    adapter_rank: int = 0
    adapts_all: bool = False

    @property
    def narrow(self) -> str:
        """Type of the scaled copies that GEMMs read ("": they read activations and weights themselves)."""
        return NARROW_TYPES.get(self.precision, "")

    @property
    def scales_blocks(self) -> bool:
        """Whether scaled copies serve one direction of contraction only."""
        return self.precision == "fp4" or (self.precision == "fp8" and self.scaling in ("block", "mx"))

    @property
    def element(self) -> str:
        """Type of activations and of the weights they are multiplied with."""
        return ELEMENT_TYPES[self.precision]

    @property
    def stream(self) -> str:
        """Type of the residual stream, and of weights before they are cast."""
        return "float32" if self.wide else self.element


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """What one rank holds of a micro-batch and of a layer.

    `batch` samples of `seq_len` tokens, of which this rank has `seq_len // cp`, packed from documents of `document`
    tokens that do not see each other (0: a sample is one); `by_heads`: for attention it has all tokens of part of its
    heads. `tp` ranks share every matrix; with
    `sequence` they also share the tokens of what stands between them. `ep` ranks share the experts, `etp` of them a
    single one; this one has `imbalance` times its even share of tokens.
    """

    batch: int
    seq_len: int
    tp: int = 1
    sequence: bool = False
    cp: int = 1
    by_heads: bool = False
    ep: int = 1
    etp: int = 1
    document: int = 0
    imbalance: float = 1.0

    @property
    def local_seq(self) -> int:
        """Tokens of a sample on this rank inside attention and feed-forward."""
        return -(-self.seq_len // self.cp)

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch that a rank multiplies with its part of the weights."""
        return self.batch * self.local_seq

    @property
    def rows(self) -> int:
        """Tokens between the matrices: fewer than `tokens` where tensor-parallel ranks share them."""
        return -(-self.tokens // self.tp) if self.sequence else self.tokens
