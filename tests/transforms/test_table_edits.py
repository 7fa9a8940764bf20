"""Tables that one table-batched op looks up together, changed in a capture, against models that were written so."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import traincast
from tests.planner.torchrec.conftest import NEEDS_TORCHREC
from tests.transforms.steps import assert_same, edited_step
from traincast.ir.validate import validate_workload
from traincast.utils.errors import TraincastError

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from traincast.capturing import capture_step  # noqa: E402

ROWS, WIDTH, LOOKUPS = (1000, 20_000, 500), 32, 8
KINDS = ["batched", "fbgemm", pytest.param("split", marks=NEEDS_TORCHREC)]
EDITS = {
    "drop-table=1": {"rows": (1000, 500), "constant": 2 * WIDTH},
    "drop-table=0+2": {"rows": (20_000,), "constant": 3 * WIDTH},
    "add-table=300000x5": {"rows": (1000, 20_000, 300_500), "lookups": 3 * LOOKUPS + 5},
    "pooling=3": {"lookups": 9},
    "pooling=x2": {"lookups": 6 * LOOKUPS},
    "rows=x4": {"rows": tuple(4 * rows for rows in ROWS)},
}
"""Each with what is written otherwise."""


def _tables(kind, rows):
    """A module from indices and offsets to [batch, columns]."""
    sizes = SimpleNamespace(rows_per_table=rows, table_rows=rows, num_tables=len(rows), embedding_dim=WIDTH,
                            optimizer="rowwise_adagrad" if kind == "fbgemm" else "sgd")  # fmt: skip
    if kind == "split":
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        specs = [(height, WIDTH, EmbeddingLocation.DEVICE, ComputeDevice.CUDA) for height in rows]
        return SplitTableBatchedEmbeddingBagsCodegen(
            specs, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.1, device=torch.device("cuda")
        )
    from traincast_evaluation.zoo.define.embeddings import TABLES

    return TABLES[kind](sizes).cuda()


def captured_tables(kind, *, rows=ROWS, constant=WIDTH, lookups=None, batch=64, host=False):
    """A step with all tables in one op alongside `constant` columns, of which a model without some tables has more; all
    bags of a sample together hold this many `lookups`."""
    lookups = LOOKUPS * len(rows) if lookups is None else lookups

    def make_step(batch_size):
        tables = _tables(kind, rows)
        below, above = nn.Linear(16, WIDTH).cuda(), nn.Linear((2 + len(ROWS)) * WIDTH, 1).cuda()
        steps = torch.optim.SGD([*below.parameters(), *above.parameters()], lr=0.01)
        dense = torch.zeros(batch_size, 16, device="cuda")
        place = "cpu" if host else "cuda"
        indices = torch.zeros(lookups * batch_size, dtype=torch.int64, device=place)
        offsets = torch.arange(len(rows) * batch_size + 1, device=place) * lookups // len(rows)
        more = torch.zeros(batch_size, constant, device="cuda")

        def step():
            steps.zero_grad()
            found = tables(indices.cuda(), offsets.cuda()).view(batch_size, -1)
            above(torch.cat([below(dense), found, more], 1)).square().mean().backward()
            steps.step()

        return step

    return capture_step(make_step, batch_size=batch, name="tables")


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def step(kind):
    return captured_tables(kind, host=True)


@pytest.mark.parametrize("edit", EDITS)
def test_edited_tables_are_those_of_a_fresh_capture(kind, step, edit):
    edited = edited_step(step, edit)
    validate_workload(edited)
    fresh = captured_tables(kind, host=True, **EDITS[edit])
    assert_same(edited, fresh)
    for size in (16, 1024):
        assert_same(edited.resized(batch_size=size), fresh.resized(batch_size=size))


def test_tables_change_with_other_edits_and_before_they_are_sharded():
    step = captured_tables("fbgemm")
    edits = ["drop-table=1", "pooling=x2", "batch-size=512", "gpus=2"]
    edited = traincast.whatif(step, on="dgx-a100", edits=edits).after
    written = captured_tables("fbgemm", rows=(1000, 500), constant=2 * WIDTH, lookups=4 * LOOKUPS)
    fresh = traincast.predict(written, on="dgx-a100", gpus=2, batch_size=512)
    assert edited.iteration == pytest.approx(fresh.iteration, rel=0.01)


@pytest.mark.parametrize(
    ("edit", "why"),
    [("drop-table=3", "its tables are 0: .*1000 x 32"), ("drop-table=tables", "no single table"),
     ("drop-table=0+1+2", "one of them must stay"), ("embedding-dim=64", "not a description"),
     ("pooling=0", "nearest is 1"), ("rows=x0", "out of range")],
)  # fmt: skip
def test_tables_that_cannot_be_changed_say_why(edit, why):
    with pytest.raises(TraincastError, match=why):
        traincast.whatif(captured_tables("batched"), on="a100-80gb", edits=[edit])


def test_tables_of_which_a_part_is_on_the_device_lose_that_part():
    whole = traincast.predict("deepfm", on="a100-80gb").memory.peak_bytes
    result = traincast.whatif("deepfm", on="a100-80gb", edits=["drop-table=5"])  # three rows of 64 columns
    assert 0 < whole - result.after.memory.peak_bytes < 1_000_000
    assert "constant" in result.after.warnings[-1]


def captured_collection(*, rows=(1000, 500), lookups=4):
    """A step of TorchRec's fused collection of tables, fed by a jagged tensor."""
    from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

    def make_step(batch_size):
        tables = [
            EmbeddingBagConfig(name=f"t_{key}", embedding_dim=WIDTH, num_embeddings=height, feature_names=[key])
            for key, height in zip("ab", rows, strict=True)
        ]
        collection = FusedEmbeddingBagCollection(tables, torch.optim.SGD, {"lr": 0.1}, device=torch.device("cuda"))
        over = nn.Linear(2 * WIDTH, 1).cuda()
        lengths = torch.full((2 * batch_size,), lookups, dtype=torch.int64)
        values = torch.zeros(2 * batch_size * lookups, dtype=torch.int64)
        features = KeyedJaggedTensor(keys=["a", "b"], values=values, lengths=lengths).to(torch.device("cuda"))
        return lambda: over(collection(features).values()).mean().backward()

    return capture_step(make_step, batch_size=64, name="collection", rebatch=False)


@NEEDS_TORCHREC
@pytest.mark.parametrize(
    ("edit", "written"), [("pooling=x2", {"lookups": 8}), ("rows=x3", {"rows": (3000, 1500)}),
                          ("add-table=700x8", {"rows": (1000, 1200), "lookups": 8})],
)  # fmt: skip
def test_tables_of_a_torchrec_collection_are_those_of_a_fresh_capture(edit, written):
    assert_same(edited_step(captured_collection(), edit), captured_collection(**written))


@NEEDS_TORCHREC
def test_lookups_that_share_a_table_have_equal_parts_of_it():
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    def make_step(batch_size):
        spec = (100, WIDTH, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
        tables = SplitTableBatchedEmbeddingBagsCodegen(
            [spec, spec], feature_table_map=[0, 0, 1], device=torch.device("cuda")
        )
        indices = torch.zeros(3 * batch_size, dtype=torch.int64, device="cuda")
        offsets = torch.arange(3 * batch_size + 1, device="cuda")
        return lambda: tables(indices, offsets).sum().backward()

    step = capture_step(make_step, batch_size=8, name="shared")
    with pytest.raises(TraincastError, match="share a table"):
        traincast.whatif(step, on="dgx-a100", edits=["drop-table=0"])
    alone, both = (traincast.predict(step, on="dgx-a100", gpus=gpus) for gpus in (1, 2))
    rows = [t.spec.numel for program in both.workload.programs for op in program.ops for t in op.inputs
            if op.name.startswith("fbgemm::split_embedding_codegen_forward") and t.spec.dtype == "float32"]  # fmt: skip
    assert sum(rows) == 200 * WIDTH  # each table once
    assert alone.memory.peak_bytes > 0 and any("equal parts" in note for note in both.warnings)
    with pytest.raises(TraincastError, match="each for one lookup"):
        traincast.shard(step, on="dgx-a100", gpus=2, torchrec=False, time_limit=0)


@NEEDS_TORCHREC
def test_rows_that_are_not_pooled_are_sharded():
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    def make_step(batch_size):
        spec = (100, WIDTH, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
        tables = SplitTableBatchedEmbeddingBagsCodegen(
            [spec, spec], pooling_mode=PoolingMode.NONE, device=torch.device("cuda")
        )
        indices = torch.zeros(6 * batch_size, dtype=torch.int64, device="cuda")
        offsets = torch.arange(2 * batch_size + 1, device="cuda") * 3
        return lambda: tables(indices, offsets).sum().backward()

    step = capture_step(make_step, batch_size=8, name="unpooled")
    both = traincast.predict(step, on="dgx-a100", gpus=2)
    ops = [op for op in both.workload.programs[0].ops if op.name == "aten::cat"]
    assert ops[0].outputs[0].spec.shape == (6 * 8, WIDTH)


@NEEDS_TORCHREC
def test_tables_of_a_captured_fbgemm_module_are_sharded():
    alone, both = (traincast.predict(captured_tables("split"), on="dgx-a100", gpus=gpus) for gpus in (1, 2))
    assert both.gpus == 2 and any(name == "collective" for name in both.by_family)
    assert both.memory.peak_bytes < alone.memory.peak_bytes
