"""Edits of sizes and of descriptions against fresh captures of the edited model: the same kernels, the same time."""

from __future__ import annotations

from dataclasses import replace

import pytest

import traincast
from tests.transforms.steps import assert_same, edited_step
from traincast.models.dlrm.config import DLRM_DDP
from traincast.planner.what_if.edits.registry import parse_edits
from traincast.planner.what_if.result import prepare_both_sides
from traincast.simulator.scenario.resolved import resolve
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from tests.evaluation.zoo.captured import capture_dlrm  # noqa: E402
from traincast.capturing import capture_step  # noqa: E402

BATCH = 512
ROWS, LOOKUPS = DLRM_DDP.rows_per_table, DLRM_DDP.lookups_per_table


@pytest.mark.parametrize(
    ("edits", "written"),
    [
        (["embedding-dim=64"], {"embedding_dim": 64, "bottom_mlp": (128, 128, 128, 64)}),
        (["pooling=x4"], {"lookups_per_table": (40,) * 8}),
        (["tables=11"], {"rows_per_table": (80_000,) * 11, "lookups_per_table": (10,) * 11}),
        (["tables=3"], {"rows_per_table": ROWS[:3], "lookups_per_table": LOOKUPS[:3]}),
        (["drop-table=1+table6"], {"rows_per_table": ROWS[:6], "lookups_per_table": LOOKUPS[:6]}),
        (["add-table=5000x10"], {"rows_per_table": (*ROWS, 5000), "lookups_per_table": (*LOOKUPS, 10)}),
        (["rows=x2"], {"rows_per_table": (160_000,) * 8}),
        (["mlp-width=2"], {"bottom_mlp": (128, 256, 256, 128), "top_mlp": (1024, 1024, 1024, 512, 1)}),
        (["bottom-mlp=128-64-128", "top-mlp=256-1"], {"bottom_mlp": (128, 64, 128), "top_mlp": (256, 1)}),
        (["optimizer=adagrad"], {"optimizer": "adagrad"}),
        (["embedding=fbgemm"], {"embedding": "fbgemm"}),
    ],
    ids=lambda given: "+".join(given) if isinstance(given, list) else "",
)
def test_an_edited_recommender_is_a_fresh_capture_of_it(edits, written):
    edited = edited_step("dlrm-ddp", *edits, f"batch-size={BATCH}")
    fresh = capture_dlrm(replace(DLRM_DDP, **written), BATCH)
    assert_same(edited, replace(edited, programs=(fresh,)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("drop-table=8", "nearest is 7"),
        ("drop-table=tabel3", "Did you mean table3"),
        ("drop-table=0+1+2+3+4+5+6+7", "must stay"),
        ("add-table=many", "integer"),
        ("add-table=10x0", "nearest is 1"),
    ],
)
def test_tables_that_are_not_there_are_refused_with_what_would_work(text, said):
    with pytest.raises(TraincastError, match=said):
        traincast.whatif("dlrm-ddp", on="v100", edits=[text])


def test_tables_that_are_looked_up_unevenly_say_how_often_each_is():
    edited = edited_step("dlrm-ddp", "add-table=5000x3")
    (forward,) = [op for op in edited.programs[0].ops if op.signature.name.startswith("traincast::batched_embedding_f")]
    assert forward.signature.scalar("pooling") == (10,) * 8 + (3,)


def test_dropping_a_table_keeps_the_others():
    _, changed = prepare_both_sides(resolve(Scenario(workload="dlrm-v2", on="h100")), parse_edits(["drop-table=20"]))
    before = resolve(Scenario(workload="dlrm-v2", on="h100")).of_dlrm()
    after = changed.of_dlrm()
    assert before.lookups_per_table[20] == 100  # the busiest
    assert after.lookups == before.lookups - 100 and after.num_tables == 25
    assert after.rows_per_table == (*before.rows_per_table[:20], *before.rows_per_table[21:])


class _Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(1000, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)

    def forward(self, tokens):
        return self.layer(self.words(tokens))


def _make_step(batch, seq_len):
    model = _Attention().cuda()
    steps = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.zeros(batch, seq_len, dtype=torch.int64, device="cuda")

    def step():
        steps.zero_grad()
        model(tokens).square().mean().backward()
        steps.step()

    return step


def _captured(batch, seq_len, *, rebatch=False):
    return capture_step(_make_step, batch_size=batch, seq_len=seq_len, name="attention", rebatch=rebatch)


@pytest.mark.parametrize("sizes", [(96, 32), (16, 80), (24, 48)])
def test_a_captured_step_of_other_sizes_is_a_fresh_capture_at_them(attention, sizes):
    batch, seq_len = sizes
    assert_same(edited_step(attention, f"batch-size={batch}", f"seq-len={seq_len}"), _captured(batch, seq_len))


@pytest.fixture(scope="module")
def attention():
    return _captured(16, 32, rebatch=True)
