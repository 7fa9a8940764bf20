"""Which op of a timeline explains a launch: what lowering knows, and what copies say of themselves."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from traincast.costs.kernels.call import KernelCall
from traincast.costs.kernels.lower import list_registered_ops, lower
from traincast.costs.kernels.registry import Item, LoweringContext
from traincast.costs.kernels.streaming import MEMCPY
from traincast.ir.ops import Signature
from traincast.traces.events import Kind
from traincast.traces.link import Linked
from traincast.traces.signatures import SignatureReader
from traincast.utils.errors import TraincastError

# ops that only call others: what they call is costed
COMPOSITE = re.compile(
    r"aten::(?:linear|to|contiguous|reshape|flatten|matmul|conv[123]d|zeros|ones|full|zeros_like|ones_like|item|pin_memory"
    r"|_batch_norm_impl_index|max_pool2d|stack|embedding_bag|\w*\.\w*)$"
)
_NODE = re.compile(r"(?:Addmm|Mm|Bmm|Mul|View|T|Sum|Mean|CudnnConvolution|Convolution)Backward(\d?)$")


# what only PyTorch 2 has: ops and kernels of it, and devices that nothing older runs on
_SINCE_2 = re.compile(
    r"scaled_dot_product|CompiledFunction|Torch-Compiled|_batch_norm_legit|^triton_|^ncclDevKernel|std::array<char"
)
_NEW_DEVICES = re.compile(r"\b(?:G?H[128]00|GH200|H20|G?B[23]00|MI3\d\d\w*)\b")
_VECTOR_NORM = "vectorized_layer_norm"  # since 1.13


def infer_framework_version(linked: Linked) -> str:
    """The PyTorch version a timeline looks like: autograd nodes are numbered since 1.11; ops have ids (not in every
    profile), and names that only PyTorch 2 has, since 2.0."""
    names = linked.trace.names
    nodes = [node[1] for node in map(_NODE.match, names) if node]
    if nodes and not all(nodes):
        return "1.8"
    if (linked.events["record_function"] > 0).any() or any(map(_SINCE_2.search, names)):
        return "2.1"
    if _NEW_DEVICES.search(linked.trace.device_name):
        return "2.1"
    return "1.13" if any(_VECTOR_NORM in name for name in names) else "1.12"


def make_version_context(version: str) -> LoweringContext:
    """How that version lowers."""
    major, _, minor = version.partition(".")
    return LoweringContext(framework_version=(int(major), int(minor)))


@dataclass(eq=False, slots=True)
class OpFinder:
    """Ties launches to the ops that explain them."""

    linked: Linked
    reader: SignatureReader
    _anchors: dict[int, int] = field(default_factory=dict)

    def find_anchor(self, launch: int) -> int:
        """The outermost op above a launch that lowering knows, else the innermost with shapes, else the innermost;
        -1 for none."""
        row = int(self.linked.parent[launch])
        if row in self._anchors:
            return self._anchors[row]
        chain = self.list_enclosing_ops(launch)
        ops = [op for op in chain if not COMPOSITE.match(self.linked.get_name(op))]
        known = [op for op in ops if self._is_lowered(op)]
        anchor = next((op for op in ops if self._has_shapes(op)), chain[0] if chain else -1)
        anchor = self._skip_nested(known) if known else anchor
        self._anchors[row] = anchor
        return anchor

    def _skip_nested(self, ops: list[int]) -> int:
        """The outermost of these ops, or the one of the same name inside of it that has larger tensors: shapes of
        nested tensors are not recorded, and their ops call themselves with plain ones."""
        name = self.linked.events["name"]
        return max((op for op in reversed(ops) if name[op] == name[ops[-1]]), key=self._count_elements)

    def _count_elements(self, op: int) -> int:
        """Elements of the largest tensor that an op was given."""
        recorded = self.reader.get_recorded(op)
        return max((spec.numel for spec in recorded.tensors), default=0) if recorded is not None else 0

    def list_enclosing_ops(self, launch: int) -> list[int]:
        """The ops that enclose a launch, innermost first."""
        return [row for row in self.linked.iterate_enclosing(launch) if self.linked.events["kind"][row] == Kind.OP]

    def _is_lowered(self, op: int) -> bool:
        name = self.linked.get_name(op)
        if name not in list_registered_ops() and "SplitLookupFunction" not in name:
            return False
        return self.reader.get_signature(op) is not None

    def _has_shapes(self, op: int) -> bool:
        name = self.linked.get_name(op)
        return name.startswith(("aten::", "fbgemm::")) and self.reader.get_signature(op) is not None

    def read_copy(self, row: int) -> KernelCall | None:
        """Copies and memsets say themselves what they move and where."""
        kind, nbytes = self.linked.events["kind"][row], int(self.linked.events["bytes"][row])
        name = self.linked.get_name(row)
        if kind == Kind.KERNEL or nbytes < 0:
            return None
        if kind == Kind.MEMSET:
            return MEMCPY.call("memset", "int8", bytes=nbytes)
        pinned = "pageable" if "Pageable" in name else "pinned"
        for direction, family_kind in (("HtoD", f"h2d_{pinned}"), ("DtoH", f"d2h_{pinned}"), ("DtoD", "d2d")):
            if direction in name:
                return MEMCPY.call(family_kind, "int8", bytes=nbytes)
        return None

    def lower_op(
        self, op: int, context: LoweringContext, *, strided: bool
    ) -> tuple[Signature | None, tuple[Item, ...]]:
        """The signature of an op and what it lowers to; nothing where what was recorded does not make a whole op."""
        signature = self.reader.get_signature(op, strided=strided)
        if signature is None:
            return None, ()
        try:
            return signature, lower(signature, context)
        except (AssertionError, IndexError, ValueError, TraincastError, ZeroDivisionError):
            return None, ()
