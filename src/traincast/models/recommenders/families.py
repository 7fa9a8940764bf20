"""Recommenders of any size, each after the code or paper it is known by: what `Description` says, as ops."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from traincast.ir.ops import StorageKind
from traincast.ir.program import Program, find_storages_of_ops
from traincast.ir.workload import PLACEMENTS, TABLES, Workload
from traincast.models.embeddings.access import format_access
from traincast.models.embeddings.table import Pooling, Table
from traincast.models.layers.builder import Ref
from traincast.models.layers.optimizers import make_optimizer_state, write_foreach_step
from traincast.models.recommenders.builder import RecommenderBuilder
from traincast.models.recommenders.description import Description
from traincast.models.recommenders.storage import DEVICE

RIGID = "a described recommender is written for one batch size; describe it with another, or ask for it"
"""Why such a step is not resized: it is written anew."""


def build_recommender_workload(what: Description, *, batch_size: int | None = None) -> Workload:
    """One training step on one GPU: FBGEMM tables that update themselves, the rest under its optimizer."""
    size = what.batch_size if batch_size is None else batch_size
    builder = RecommenderBuilder(size, what.storages)
    _FAMILIES[what.recommender](builder, what, size)
    trained = [parameter for parameter in builder.parameters if parameter.tensor in builder.gradients]
    grads = [builder.gradients[parameter.tensor] for parameter in trained]
    stepped = make_optimizer_state(builder, what.optimizer, trained)
    write_foreach_step(builder, what.optimizer, stepped, grads)
    program = _free_after_last_use(builder.build_program())
    meta = {
        "description": f"a described {what.recommender}",
        "optimizer": what.optimizer,
        TABLES: _describe(builder, what),
    }
    return Workload(name=what.name, programs=(replace(program, rigid=RIGID),), meta=meta)


def _describe(builder: RecommenderBuilder, what: Description) -> str:
    """The tables by their names, as JSON, and how they are placed where the description says that."""
    entries: list[dict[str, Any]] = [
        {
            "name": table.name, "rows": table.rows, "dim": table.dim, "optimizer": table.optimizer,
            "pooling": {"lengths": table.pooling.lengths, "shares": table.pooling.shares},
            "access": format_access(table.access),
        }
        for tables in builder.tables
        for table in tables
    ]  # fmt: skip
    if not (what.storages or what.shardings):
        return json.dumps({"tables": entries})
    placements = [
        {
            "kind": what.shardings.get(entry["name"]), "storage": kept.describe(),
        }
        for entry in entries for kept in (what.storages.get(entry["name"], DEVICE),)
    ]  # fmt: skip
    return json.dumps({"tables": entries, PLACEMENTS: placements})


def _write_deep_fm(builder: RecommenderBuilder, what: Description, batch: int) -> None:
    """As TorchRec's SimpleDeepFMNN: a factorization machine and an MLP over the same embeddings, side by side."""
    dim, count = what.tables[0].dim, len(what.tables)
    numbers = builder.apply_mlp(builder.make_input(batch, what.dense_features), (*what.dense_mlp, dim))
    rows = builder.reshape(builder.look_up(what.tables, batch), batch, count, dim)
    features = builder.join([builder.reshape(numbers, batch, 1, dim), rows], 1)
    total = builder.add_up(features, 1)
    squares = builder.add_up(builder.multiply(features, features), 1)
    pairs = builder.scale(
        builder.add_up(builder.subtract(builder.multiply(total, total), squares), 1, keepdim=True), 0.5
    )
    deep = builder.apply_mlp(builder.reshape(features, batch, (count + 1) * dim), what.mlp)
    builder.write_loss(builder.apply_linear(builder.join([numbers, deep, pairs], 1), 1))


def _write_wide_and_deep(builder: RecommenderBuilder, what: Description, batch: int) -> None:
    """A sum of weights, one a feature, alongside an MLP over embeddings (Cheng et al., 2016). The weights are tables of
    four columns, the least that FBGEMM has."""
    count, width = len(what.tables), sum(table.dim for table in what.tables)
    weights = [replace(table, name=f"{table.name}.wide", dim=4) for table in what.tables]  # on the device
    wide = builder.reshape(builder.look_up(weights, batch), batch, count, 4)
    summed = builder.add_up(builder.reshape(builder.take(wide, 2, 0, 1), batch, count), 1, keepdim=True)
    numbers = builder.make_input(batch, what.dense_features)
    embedded = builder.reshape(builder.look_up(what.tables, batch), batch, width)
    deep = builder.apply_mlp(builder.join([numbers, embedded], 1), what.mlp)
    builder.write_loss(builder.add(builder.apply_linear(deep, 1), summed))


def _write_two_tower(builder: RecommenderBuilder, what: Description, batch: int) -> None:
    """As TorchRec's example of retrieval: an MLP over the tables of each side, and the product of both results."""
    sides = []
    for names in (what.query, what.candidate):
        tables = [table for table in what.tables if table.name in names]
        sides.append(builder.apply_mlp(builder.look_up(tables, batch), what.mlp))
    builder.write_loss(builder.add_up(builder.multiply(*sides), 1, keepdim=True))


def _write_din(builder: RecommenderBuilder, what: Description, batch: int) -> None:
    """Deep Interest Network (Zhou et al., 2018): unpooled rows of a history, weighted by what is on offer."""
    width, length = sum(table.dim for table in what.tables), what.history.longest
    rows = builder.look_up(_take_one_each(what.tables), batch * (length + 1))
    rows = builder.reshape(rows, batch, length + 1, width)
    offered, history = builder.take(rows, 1, 0, 1), builder.take(rows, 1, 1, length + 1)
    query = builder.expand(offered, batch, length, width)
    both = builder.join([query, history, builder.subtract(query, history), builder.multiply(query, history)], 2)
    scores = builder.apply_linear(builder.apply_mlp(both, what.attention_mlp), 1)
    scores = builder.multiply(builder.swap(scores, 1, 2), builder.make_input(batch, 1, length))
    interest = builder.reshape(builder.multiply_matrices(scores, history), batch, width)
    offered = builder.reshape(offered, batch, width)
    deep = builder.apply_mlp(builder.join([offered, interest, builder.multiply(offered, interest)], 1), what.mlp)
    builder.write_loss(builder.apply_linear(deep, 1))


def _write_hstu(builder: RecommenderBuilder, what: Description, batch: int) -> None:
    """HSTU of generative recommenders: what an action looks up, unpooled, layers of gated attention without softmax,
    and the score of what followed. `attention: fused` runs one kernel over all lengths, `padded` op by op."""
    width, lengths = what.tables[0].dim, what.history
    tokens = round(batch * lengths.mean)
    actions = tuple(t for t in what.tables if t.name in what.per_action) or what.tables[:1]
    x = builder.look_up(_take_one_each(actions), tokens)
    if len(actions) > 1:
        x = builder.apply_linear(x, width)
    offsets = builder.make_input(batch + 1, dtype="int64")
    for _ in range(what.layers):
        x = _write_hstu_layer(builder, what, x, offsets, batch)
    rest = [table for table in what.tables if table not in actions]
    if rest:  # what is known of the sample besides its history
        context = builder.look_up(rest, batch)
        last = builder.apply_linear(builder.take(x, 0, 0, batch), width)
        x = builder.join([last, context], 1)
    builder.write_loss(builder.apply_linear(builder.apply_mlp(x, what.mlp), 1))


def _write_hstu_layer(builder: RecommenderBuilder, what: Description, x: Ref, offsets: Ref, batch: int) -> Ref:
    inner, tokens = what.heads * what.head_dim, x.shape[0]
    mixed = builder.apply_unary("silu", builder.apply_linear(builder.normalise(x), 4 * inner, bias=False))
    gate, *parts = builder.split(mixed, 4)
    if what.attention == "fused":
        value, query, key = (builder.reshape(part, tokens, what.heads, what.head_dim) for part in parts)
        attended = builder.attend_pointwise(query, key, value, offsets, what.history.effective)
        rows = builder.reshape(attended, tokens, inner)
    else:
        rows = _attend_padded(builder, what, parts, offsets, batch)
    return builder.add(builder.apply_linear(builder.multiply(gate, builder.normalise(rows)), x.shape[1]), x)


def _attend_padded(
    builder: RecommenderBuilder, what: Description, parts: Sequence[Ref], offsets: Ref, batch: int
) -> Ref:
    """Every score of sequences padded to the longest, op by op."""
    (tokens, inner), length = parts[0].shape, what.history.longest
    merged = (batch * what.heads, length, what.head_dim)
    padded = [_pad(builder, part, (batch, length, inner), offsets) for part in parts]
    heads = [builder.swap(builder.reshape(one, batch, length, what.heads, what.head_dim), 1, 2) for one in padded]
    value, query, key = (builder.reshape(one, *merged) for one in heads)
    scores = builder.add(
        builder.multiply_matrices(query, builder.swap(key, 1, 2)), builder.make_parameter(length, length)
    )
    weights = builder.multiply(builder.apply_unary("silu", scores), builder.make_input(length, length))
    attended = builder.reshape(builder.multiply_matrices(weights, value), batch, what.heads, length, what.head_dim)
    joined = builder.reshape(builder.swap(attended, 1, 2), batch, length, inner)
    return builder.convert_jagged(_TO_JAGGED, _TO_PADDED, joined, (tokens, inner), offsets, [("total_L", tokens)])


def _write_one_trans(builder: RecommenderBuilder, what: Description, batch: int) -> None:
    """A Transformer like OneTrans: behaviour and features in one causal sequence; the first table has the items."""
    width, length, count = what.tables[0].dim, what.history.longest, len(what.tables) - 1
    items = builder.look_up(_take_one_each(what.tables[:1]), batch * length)
    behaviour = builder.add(builder.reshape(items, batch, length, width), builder.make_parameter(length, width))
    features = builder.reshape(builder.look_up(what.tables[1:], batch), batch, count, width)
    for _ in range(what.layers):
        behaviour, features = _write_one_trans_layer(builder, what, behaviour, features)
    builder.write_loss(builder.apply_linear(builder.reshape(features, batch, count * width), 1))


def _write_one_trans_layer(
    builder: RecommenderBuilder, what: Description, behaviour: Ref, features: Ref
) -> tuple[Ref, Ref]:
    """Behaviour shares its weights, every feature has its own."""
    batch, length, width = behaviour.shape
    count, tokens = features.shape[1], behaviour.shape[1] + features.shape[1]

    def divide(x: Ref) -> tuple[Ref, Ref]:
        return builder.take(x, 1, 0, length), builder.take(x, 1, length, tokens)

    def mix(shared: Ref, own: Ref, to: int) -> tuple[Ref, Ref]:
        weights = builder.make_parameter(count, own.shape[2], to)
        mixed = builder.multiply_matrices(builder.swap(own, 0, 1), weights)
        return builder.apply_linear(shared, to), builder.swap(mixed, 0, 1)

    x = builder.join([behaviour, features], 1)
    mixed = builder.join(mix(*divide(builder.normalise(x)), 3 * width), 1)
    shape = (batch, tokens, what.heads, width // what.heads)
    heads = [builder.swap(builder.reshape(part, *shape), 1, 2) for part in builder.split(mixed, 3)]
    attended = builder.reshape(builder.swap(builder.attend(*heads), 1, 2), batch, tokens, width)
    x = builder.add(builder.apply_linear(attended, width), x)
    inner = [builder.apply_unary("gelu", part) for part in mix(*divide(builder.normalise(x)), 4 * width)]
    added = mix(inner[0], inner[1], width)
    before = divide(x)
    return builder.add(before[0], added[0]), builder.add(before[1], added[1])


_TO_PADDED, _TO_JAGGED = "fbgemm::jagged_to_padded_dense_forward", "fbgemm::dense_to_jagged_forward"


def _pad(builder: RecommenderBuilder, rows: Ref, shape: tuple[int, ...], offsets: Ref) -> Ref:
    return builder.convert_jagged(_TO_PADDED, _TO_JAGGED, rows, shape, offsets, [("max_lengths", (shape[1],))])


def _take_one_each(tables: tuple[Table, ...]) -> list[Table]:
    """Tables whose rows are not pooled: every lookup is a bag."""
    return [replace(table, pooling=Pooling.from_constant(1.0)) for table in tables]


_FAMILIES: dict[str, Callable[[RecommenderBuilder, Description, int], None]] = {
    "deepfm": _write_deep_fm, "wide-deep": _write_wide_and_deep, "two-tower": _write_two_tower, "din": _write_din,
    "hstu": _write_hstu, "onetrans": _write_one_trans,
}  # fmt: skip


def _free_after_last_use(program: Program) -> Program:
    """Activations go with the last op that uses them, as references to them do; gradients stay for the next step."""
    c = program.columns
    last = np.full(len(c.storage_bytes), -1, dtype=c.storage_free.dtype)
    for op in range(program.num_ops):
        last[find_storages_of_ops(program, op, op + 1)] = op
    made = (c.storage_alloc >= 0) & (c.storage_kind == StorageKind.ACTIVATION)
    return replace(program, columns=replace(c, storage_free=np.where(made, last, c.storage_free)))
