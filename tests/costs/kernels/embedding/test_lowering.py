from __future__ import annotations

import numpy as np
import pytest

from tests.costs.kernels.embedding.described import distinct_rows
from tests.costs.kernels.signatures import field, kernels, lowered, tensor
from traincast.costs.kernels.embedding.physics import make_uniform_tables
from traincast.costs.kernels.registry import LoweringContext


def _ids(count: int, dtype: str = "int64"):
    return tensor(count, dtype=dtype)


@pytest.mark.parametrize(("rows", "lookups"), [(1, 5), (10, 1), (1000, 1000), (50, 2000)])
def test_distinct_rows_agrees_with_drawing(rows, lookups):
    draws = np.random.default_rng(0).integers(0, rows, size=(2000, lookups))
    counted = np.mean([len(np.unique(draw)) for draw in draws])
    tables = make_uniform_tables(batch=1, lookups=lookups, rows=(rows,), dims=(8,), index_bytes=8, row_item_bytes=4)
    assert tables.distinct == pytest.approx(counted, rel=0.01)


def test_plain_lookup():
    """ATen's index_select took an element a thread until PyTorch 2.7, and copies whole rows since."""
    given = ("aten::embedding", {"weight": tensor(30522, 1024), "indices": _ids(4096)}, tensor(4096, 1024))
    (call,) = lowered(*given)
    assert (call.kind, field(call, "lookups"), field(call, "columns")) == ("row_gather", 4096, 1024)
    assert field(call, "distinct_rows") == pytest.approx(distinct_rows(30522, 4096))
    (older,) = lowered(*given, context=LoweringContext(framework_version=(2, 7)))
    assert (older.kind, older.values) == ("lookup_forward", call.values)


def test_dense_gradient_sorts_only_many_indices():
    def calls(count: int):
        inputs = {"grad_output": tensor(count, 64), "indices": _ids(count)}
        return kernels(lowered("aten::embedding_dense_backward", inputs, tensor(30522, 64)))

    assert calls(512) == ["elementwise:fill", "embedding:lookup_backward_dense"]
    assert "index:sort" in calls(8192)


def _batched(lookups: int, batch: int = 2048, tables: int = 8):
    weights = tensor(8_000_000, 64)
    inputs = {
        "weights": weights,
        "table_offsets": _ids(tables),
        "indices": _ids(batch * tables * lookups, "int32"),
        "offsets": _ids(batch * tables + 1, "int32"),
    }
    rows, dims = (1_000_000,) * tables, (64,) * tables
    return lowered("traincast::batched_embedding_forward", inputs, tensor(batch, tables, 64), rows=rows, dims=dims)


def test_table_batched_lookup():
    (call,) = _batched(100)
    assert (field(call, "batch"), field(call, "tables"), field(call, "lookups")) == (2048, 8, 1638400)
    assert field(call, "distinct_rows") == pytest.approx(8 * distinct_rows(1_000_000, 204_800))
    assert (field(call, "index_bytes"), field(call, "sorted")) == (4, 1)


def test_single_lookups_have_no_order():
    (call,) = _batched(1)
    assert field(call, "sorted") == 0


def test_fbgemm_backward_launches_what_its_trace_shows():
    inputs = {
        "grad_output": tensor(128, 48),
        "dev_weights": tensor(640_209_296),
        "indices": _ids(13312),
        "offsets": _ids(3 * 128 + 1),
    }
    name = "fbgemm::split_embedding_backward_codegen_adagrad_unweighted_exact_cuda"
    calls = lowered(name, inputs, rows=(40_000_000, 10_000, 3081), dims=(16, 16, 16))
    # V100 trace, rank 3: 26 launches, the last two of which (long and short runs) are one call here
    assert len(calls) == 23
    assert kernels(calls)[:1] == ["index:gather"]
    assert kernels(calls).count("index:sort") == 4
    assert kernels(calls)[-1] == "embedding:tbe_backward_adagrad"
    assert (field(calls[-1], "batch"), field(calls[-1], "tables"), field(calls[-1], "columns")) == (128, 3, 48)


def test_coalescing_a_sparse_gradient_sorts_it():
    parts = [tensor(1, 5000, dtype="int64"), tensor(5000, 64)]
    calls = lowered("aten::_coalesce", {"self": parts}, parts, self_layout="sparse_coo")
    assert kernels(calls).count("index:sort") == 8
    assert field(calls[-1], "elements") == 5000 * 64


def test_tables_of_one_kernel_may_differ_in_pooling_and_access():
    """Given as many lookups in all, when one table has most of them, then its bags are the longest and rows fewer."""
    inputs = {
        "weights": tensor(2_000_000, 64),
        "table_offsets": _ids(2),
        "indices": _ids(512 * 20, "int32"),
        "offsets": _ids(2 * 512 + 1, "int32"),
    }
    forms = {"rows": (1_000_000, 1_000_000), "dims": (64, 64)}
    name, result = "traincast::batched_embedding_forward", tensor(512, 2, 64)
    (even,) = lowered(name, inputs, result, **forms)
    (uneven,) = lowered(name, inputs, result, **forms, pooling=(1, 19), access=("uniform", "zipf:1.1"))
    assert field(even, "lookups") == field(uneven, "lookups") == 512 * 20
    assert (field(even, "longest_bag"), field(uneven, "longest_bag")) == (10, 19)
    assert field(uneven, "distinct_rows") < 0.6 * field(even, "distinct_rows")


def test_a_sparse_gradient_of_bags_is_a_gather_of_the_bags_gradients():
    # given the backward of nn.EmbeddingBag(sparse=True) as PyTorch 1.8 runs it: indices and values come out
    indices, bags = tensor(800, dtype="int32"), tensor(8, dtype="int32")
    inputs = {"grad": tensor(8, 64), "indices": indices, "offsets": bags}
    (call,) = lowered(
        "aten::_embedding_bag_backward", inputs, [tensor(1, 800, dtype="int64"), tensor(800, 64)],
        num_weights=1000, sparse=True,
    )  # fmt: skip

    # then it is one kernel that writes a row for each lookup, not a dense gradient
    assert call.family.name == "index"
