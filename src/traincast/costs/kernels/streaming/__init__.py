"""Kernels that stream memory: element-wise ops, copies, reductions, pooling, indexing, transfers."""

from __future__ import annotations

from traincast.costs.kernels.contract import Family, FamilyRecord

ELEMENTWISE = Family(
    "elementwise",
    # the arithmetic class; "copy" also stands for casts and fills, "dropout" draws random numbers, "strided" is cheap
    # arithmetic on operands of unlike layout (one is broadcast, say), whose offsets cost more than the arithmetic
    (
        "add", "mul", "div", "pow", "tanh", "relu", "gelu", "exp", "copy", "fill", "dropout", "compare", "optimizer",
        "loss", "strided",
    ),
    # bytes that must be moved, elements of the output, and how many tensors take part (foreach: all lists together)
    ("elements", "bytes_read", "bytes_written", "tensors"),
)  # fmt: skip
COPY = Family(
    "copy",
    # layout: a strided or transposing copy; cat: concatenation or split
    ("layout", "cat"),
    ("elements", "bytes_read", "bytes_written", "tensors"),
)
REDUCTION = Family(
    "reduction",
    # over the last (contiguous) dimension, over an outer one (column sums), or over everything
    ("inner", "outer", "full"),
    ("elements", "outputs", "bytes_read", "bytes_written"),
)
POOL = Family("pool", ("forward", "backward"), ("elements", "window", "bytes_read", "bytes_written"))
INDEX = Family(
    "index",
    # gather reads rows at random; scatter adds with atomics; sort is one pass of a radix sort of `elements` keys;
    # put is index_put's accumulation after a sort (one warp per distinct index, `row_elements` contiguous)
    ("gather", "scatter", "sort", "put"),
    ("elements", "row_elements", "bytes_read", "bytes_written"),
)
MEMCPY = Family(
    "memcpy",
    ("h2d_pinned", "h2d_pageable", "d2h_pinned", "d2h_pageable", "d2d", "memset"),
    ("bytes",),
)


def _make_record(family: Family, *lowering: str) -> FamilyRecord:
    """A family whose fitted state is the memory system that all of them share."""
    name = family.name
    return FamilyRecord(
        family=family,
        package=__name__,
        lowering=tuple(f"lowering.{module}" for module in lowering),
        roofline=f"physics:{name}_seconds",
        model=f"model:{name.capitalize()}Model",
        profile="elementwise",
    )


RECORDS = (
    _make_record(ELEMENTWISE, "elementwise", "reduction"),
    _make_record(COPY, "elementwise"),
    _make_record(REDUCTION, "reduction"),
    _make_record(POOL, "reduction"),
    _make_record(INDEX, "index"),
    _make_record(MEMCPY),
)
