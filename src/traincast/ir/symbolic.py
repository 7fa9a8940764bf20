"""Signatures whose integers are indices into a `SizeTable`, and the road between them and plain ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from traincast.ir.ops import Scalar, Signature, TensorSpec


class SizeRef(int):
    """An index into a `SizeTable`, standing for an integer scalar argument.

    It equals no plain number: `alpha=1.0` and an alpha that is size number 1 are different arguments.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SizeRef) and int(self) == int(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(("SizeRef", int(self)))


Number: TypeAlias = Callable[[int], int]


def replace_sizes_by_indices(
    signature: Signature, index: Number, known: dict[TensorSpec, TensorSpec] | None = None
) -> Signature:
    """A plain signature with `index` of every dimension, stride and integer argument in its place, in that order.

    `known` keeps what forms of tensors became, for an `index` that gives the same number for the same size.
    """

    def mapped(spec: TensorSpec) -> TensorSpec:
        if known is None:
            return _map_spec(spec, index)
        found = known.get(spec)
        if found is None:
            found = known[spec] = _map_spec(spec, index)
        return found

    return Signature(
        name=signature.name,
        inputs=tuple([mapped(spec) for spec in signature.inputs]),
        outputs=tuple([mapped(spec) for spec in signature.outputs]),
        scalars=tuple([(name, _index_value(value, index)) for name, value in signature.scalars]),
        groups=signature.groups,
        overload=signature.overload,
    )


def replace_indices_by_sizes(signatures: Sequence[Signature], sizes: Sequence[int]) -> tuple[Signature, ...]:
    """Signatures with indices, each looked up in `sizes`.

    Each tensor form is looked up once: fused optimizers pass hundreds of tensors of a few forms.
    """
    size = sizes.__getitem__
    forms = {id(spec): spec for s in signatures for spec in (*s.inputs, *s.outputs)}
    known: dict[TensorSpec, TensorSpec] = {}
    plain = {key: known.get(spec) or known.setdefault(spec, _map_spec(spec, size)) for key, spec in forms.items()}
    return tuple(
        [
            Signature(
                name=s.name,
                inputs=tuple([plain[id(spec)] for spec in s.inputs]),
                outputs=tuple([plain[id(spec)] for spec in s.outputs]),
                scalars=tuple([(name, _resolve_value(value, size)) for name, value in s.scalars]),
                groups=s.groups,
                overload=s.overload,
            )
            for s in signatures
        ]
    )


def list_size_indices(signature: Signature) -> list[int]:
    """The indices of a signature with indices: where these sizes are equal, so are the plain signatures."""
    used = [size for spec in (*signature.inputs, *signature.outputs) for size in (*spec.shape, *spec.stride)]
    values = [value for _, value in signature.scalars]
    while values:
        value = values.pop()
        if isinstance(value, tuple):
            values.extend(value)
        elif isinstance(value, SizeRef):
            used.append(value)
    return used


def separate_forms_and_sizes(signatures: Sequence[Signature]) -> tuple[tuple[Signature, tuple[int, ...]], ...]:
    """Plain signatures with every size set to index zero, each with the sizes that were taken out, in order.

    Each tensor form is taken apart once, as in `with_plain_sizes`.
    """
    specs = {id(spec): spec for s in signatures for spec in (*s.inputs, *s.outputs)}
    empty = {key: _map_spec(spec, lambda _: 0) for key, spec in specs.items()}
    sizes = {key: (*spec.shape, *spec.stride) for key, spec in specs.items()}
    apart = []
    for s in signatures:
        taken = [size for spec in (*s.inputs, *s.outputs) for size in sizes[id(spec)]]

        def take(size: int, taken: list[int] = taken) -> int:
            taken.append(size)
            return 0

        form = Signature(
            name=s.name,
            inputs=tuple([empty[id(spec)] for spec in s.inputs]),
            outputs=tuple([empty[id(spec)] for spec in s.outputs]),
            scalars=tuple([(name, _index_value(value, take)) for name, value in s.scalars]),
            groups=s.groups,
            overload=s.overload,
        )
        apart.append((form, tuple(taken)))
    return tuple(apart)


def _map_spec(spec: TensorSpec, number: Number) -> TensorSpec:
    return TensorSpec(
        tuple([number(size) for size in spec.shape]),
        tuple([number(size) for size in spec.stride]),
        spec.dtype,
        spec.device,
    )


def _index_value(value: Scalar, index: Number) -> Scalar:
    if isinstance(value, tuple):
        return tuple([_index_value(item, index) for item in value])
    return SizeRef(index(value)) if type(value) is int else value


def _resolve_value(value: Scalar, size: Number) -> Scalar:
    if isinstance(value, tuple):
        if set(map(type, value)) == {SizeRef}:  # sizes to and from a thousand ranks
            return tuple(map(size, value))  # type: ignore[arg-type]
        return tuple([_resolve_value(item, size) for item in value])
    return size(value) if isinstance(value, SizeRef) else value
