"""The types that autocast gives to ops and their tensors, storage by storage, and casts between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from traincast.ir.editor import ProgramEditor
from traincast.ir.ops import (
    BANNED,
    FLOAT32,
    FLOAT32_RESULT,
    LOWER_PRECISION,
    NORMS,
    RECURRENT,
    WIDEST,
    Phase,
    Signature,
    StorageKind,
    TensorSpec,
)
from traincast.ir.program import Program
from traincast.ir.rows import OpRow

WIDE = "float32"


class Policy(Enum):
    """What happens to the tensors that an op is given."""

    LOWER = auto()  # cast to 16 bits
    WIDER = auto()  # cast to float32
    RESULT = auto()  # the op is told to give float32
    WIDEST = auto()  # cast to the widest of them
    REFUSED = auto()


def _named(names: Sequence[str], policy: Policy) -> dict[str, Policy]:
    return {f"aten::{name.partition('.')[0]}": policy for name in names}


POLICIES = {
    **_named((*LOWER_PRECISION, *RECURRENT), Policy.LOWER),
    **_named(FLOAT32, Policy.WIDER),
    **_named((*FLOAT32_RESULT, *NORMS), Policy.RESULT),
    **_named(WIDEST, Policy.WIDEST),
    **_named((BANNED,), Policy.REFUSED),
}
"""By the name of the op that a script calls."""
_KERNELS = {
    **_named(("nll_loss_forward", "nll_loss2d_forward"), Policy.WIDER),
    **_named(("_softmax", "_log_softmax"), Policy.RESULT),
    **_named(("_prelu_kernel",), Policy.LOWER),
}
SOFTMAX = ("aten::_softmax", "aten::_log_softmax")
_TYPED = "aten::cross_entropy_loss"
"""Asks its softmax for the type it was given, which autocast leaves alone."""


def policy_of(scope: str, signature: Signature) -> Policy | None:
    """What happens to an op that another op calls; None: nothing."""
    policy = _KERNELS.get(signature.name) or POLICIES.get(signature.name)
    told = scope == _TYPED and signature.name in SOFTMAX
    return None if policy is Policy.RESULT and (told or signature.scalar("dtype") is not None) else policy


_STATISTICS = {
    "aten::native_layer_norm": (1, 2), "aten::native_batch_norm": (1, 2), "aten::cudnn_batch_norm": (1, 2),
    "aten::_scaled_dot_product_fused_attention_overrideable": (1,), "aten::_scaled_dot_product_flash_attention": (1,),
    "aten::_scaled_dot_product_efficient_attention": (1,),
}  # fmt: skip
"""Results that are float32 whatever an op is given."""
_BY_ARGUMENT = {
    "aten::native_batch_norm": ("input",), "aten::cudnn_batch_norm": ("input",),
    "aten::native_layer_norm": ("input",),
    "aten::native_batch_norm_backward": ("input", "weight", "weight"),
    "aten::cudnn_batch_norm_backward": ("input", "weight", "weight"),
    "aten::native_layer_norm_backward": ("input", "weight", "weight"),
    "aten::native_group_norm_backward": ("input", "weight", "weight"),
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": ("query", "key", "value", "attn_bias"),
    "aten::_scaled_dot_product_flash_attention_backward": ("query", "key", "value"),
    "aten::_scaled_dot_product_efficient_attention_backward": ("query", "key", "value", "attn_bias"),
    "aten::_scaled_dot_product_fused_attention_overrideable": ("query",),
    "aten::_scaled_dot_product_flash_attention": ("query",),
    "aten::_scaled_dot_product_efficient_attention": ("query",),
}  # fmt: skip
"""The argument whose type each result has, the last for all others; of other ops the widest type decides."""


def result_type(signature: Signature, types: Sequence[str], number: int) -> str:
    """The type of a result that was float32, for the types that an op is now given."""
    if number in _STATISTICS.get(signature.name, ()):
        return WIDE
    by_argument = _BY_ARGUMENT.get(signature.name)
    if by_argument is not None:
        argument = by_argument[min(number, len(by_argument) - 1)]
        for name, span in signature.spans():
            if name == argument and (given := types[span]):
                return given[0]
    if signature.name == "aten::_to_copy":
        return types[0]
    floats = [
        (bool(spec.shape), kind)
        for spec, kind in zip(signature.inputs, types, strict=True)
        if spec.dtype == WIDE and spec.device == "cuda"
    ]
    # a number on the device does not widen tensors
    deciding = [kind for shaped, kind in floats if shaped] or [kind for _, kind in floats]
    return WIDE if not deciding or WIDE in deciding else deciding[0]


@dataclass(eq=False, slots=True)
class Cast:
    """A copy in another type: `op` makes `result` of `source`. `kept`: one copy serves the whole forward pass."""

    op: OpRow
    source: int
    result: int
    kept: bool = False


class Typing:
    """A program whose tensors change their types; `types` holds those of storages that are no longer float32."""

    def __init__(self, program: Program) -> None:
        self.editor = ProgramEditor(program)
        self.sizes = self.editor.sizes
        self.original = list(self.editor.tensors)  # the storage of every tensor before the edit
        self.types: dict[int, str] = {}
        self.forms: dict[int, TensorSpec] = {}  # of tensors that were not there before
        self.program = program
        self._decided: set[int] = set()
        self._saved = self._read_in_backward()
        made = {tensor for op in self.editor.ops for tensor in op.outputs}
        self.aliases: dict[int, list[int]] = {}  # tensors that no op makes, by their storage
        for tensor, storage in enumerate(self.original):
            if tensor not in made:
                self.aliases.setdefault(storage, []).append(tensor)

    def type_of(self, tensor: int, spec: TensorSpec) -> str:
        """The type of a tensor now."""
        return self.types.get(self.editor.tensors[tensor], WIDE) if spec.dtype == WIDE else spec.dtype

    def form(self, tensor: int, spec: TensorSpec) -> TensorSpec:
        """The form of a tensor now."""
        if tensor in self.forms:
            return self.forms[tensor]
        kind = self.type_of(tensor, spec)
        return spec if kind == spec.dtype else replace(spec, dtype=kind)

    def narrow(self, storage: int, kind: str) -> None:
        """Memory that holds numbers of this type from the start."""
        if storage in self._decided:
            return
        self._decided.add(storage)
        if kind != WIDE:
            self.types[storage] = kind
            row = self.editor.storages[storage]
            row.size = self.sizes.share(row.size, 2)

    def narrow_all(self, kind: str) -> None:
        """All that is there before the step holds numbers of this type, but for single numbers such as counts."""
        for op in self.editor.ops:
            for tensor, spec in zip(
                (*op.inputs, *op.outputs), (*op.signature.inputs, *op.signature.outputs), strict=True
            ):
                storage = self.original[tensor]
                there = not self.editor.storages[storage].made
                if there and spec.dtype == WIDE and spec.shape and self._moves(storage, spec):
                    self.narrow(storage, kind)

    def _moves(self, storage: int, spec: TensorSpec) -> bool:
        """Whether `model.to` or what feeds the model would convert it."""
        return spec.device == "cuda" or self.editor.storages[storage].kind == StorageKind.INPUT

    def place(self, op: OpRow, swapped: Mapping[int, int], result: Callable[[Signature, list[str], int], str]) -> None:
        """Gives an op its inputs, those in `swapped` replaced, and its results their types."""
        old = op.signature
        inputs = tuple(swapped.get(t, t) for t in op.inputs)
        kinds = [self.forms[t].dtype if t in self.forms else self.type_of(t, spec)
                 for t, spec in zip(inputs, old.inputs, strict=True)]  # fmt: skip
        homes: dict[int, int] = {}
        for before, now in zip(op.inputs, inputs, strict=True):
            homes.setdefault(self.original[before], self.editor.tensors[now])
        specs = tuple([self.form(t, spec) for t, spec in zip(inputs, old.inputs, strict=True)])
        outputs = tuple(swapped.get(t, t) if t in op.inputs else t for t in op.outputs)
        for number, (tensor, spec) in enumerate(zip(outputs, old.outputs, strict=True)):
            if tensor in inputs:
                continue
            home = homes.get(self.original[tensor])
            if home is not None:
                self.editor.tensors[tensor] = home
                self._view(tensor, spec, old.inputs, specs)
            elif spec.dtype == WIDE and spec.device == "cuda":
                self.narrow(self.editor.tensors[tensor], result(old, kinds, number))
        made = tuple([self.form(t, spec) for t, spec in zip(outputs, old.outputs, strict=True)])
        if inputs != op.inputs or specs != old.inputs or made != old.outputs:
            op.inputs, op.outputs = inputs, outputs
            op.signature = replace(old, inputs=specs, outputs=made)

    def _view(self, tensor: int, spec: TensorSpec, before: tuple[TensorSpec, ...], now: tuple[TensorSpec, ...]) -> None:
        """A view of a copy without gaps has its strides."""
        changed = {
            old: new
            for one, other in zip(before, now, strict=True)
            if one.stride != other.stride
            for old, new in zip(one.stride, other.stride, strict=True)
        }
        if changed:
            stride = tuple(changed.get(size, size) for size in spec.stride)
            self.forms[tensor] = replace(spec, stride=stride, dtype=self.type_of(tensor, spec))

    def cast(self, source: int, spec: TensorSpec, kind: str, near: OpRow) -> Cast:
        """A copy of a tensor in another type, made where `near` runs; who puts it there is the caller."""
        form = self.form(source, spec)
        made = replace(form, dtype=kind, stride=self._stride(form))
        size = self.sizes.product(made.shape, times=made.itemsize)
        result = self.editor.add_tensor(size, StorageKind.ACTIVATION)
        storage = len(self.editor.storages) - 1
        self.original.append(storage)
        self.forms[result] = made
        self._decided.add(storage)
        if kind != WIDE:
            self.types[storage] = kind
        options = (("dtype", kind), ("non_blocking", False), ("memory_format", None))
        signature = Signature("aten::_to_copy", (form,), (made,), options, (("self", 1),))
        return Cast(OpRow(signature, (source,), (result,), near.module, near.stream), source, result)

    def _stride(self, form: TensorSpec) -> tuple[int, ...]:
        """Copies keep the order of dimensions and have no gaps."""
        pairs = sorted(zip(form.stride, form.shape, strict=True), key=lambda pair: self._value(pair[0]))
        expected = 1
        for stride, size in pairs:
            if self._value(size) != 1 and self._value(stride) != expected:
                break
            expected *= self._value(size)
        else:
            return form.stride
        order = sorted(range(len(form.shape)), key=lambda place: self._value(form.stride[place]))
        return tuple(
            self.sizes.product([form.shape[inner] for inner in order[: order.index(place)]])
            for place in range(len(form.shape))
        )

    def _value(self, size: int) -> int:
        return self.sizes.at(size, self.program.batch_size, self.program.seq_len)

    def build(self) -> Program:
        """The program with its new types."""
        for storage in self._saved - self._read_in_backward():  # its backward op reads a cast now
            row = self.editor.storages[storage]
            if row.made and not row.lasts:
                row.free = None
        return self.editor.build()

    def _read_in_backward(self) -> set[int]:
        """Memory that ops of the backward pass touch."""
        return {
            self.editor.tensors[tensor]
            for scope in self.editor.scopes
            if scope.phase == Phase.BACKWARD
            for op in scope.ops
            for tensor in (*op.inputs, *op.outputs)
        }
