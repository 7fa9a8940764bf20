"""Tables taken out of captured steps and put in, against models that were written so."""

from __future__ import annotations

import pytest

import traincast
from tests.transforms.steps import assert_same, edited_step
from traincast.ir.validate import validate_workload
from traincast.utils.errors import TraincastError

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from traincast.capturing import capture_step  # noqa: E402

ROWS, WIDTH, LOOKUPS = (1000, 20_000, 500), 32, 8
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}


class _Tables(nn.Module):
    """Tables alongside dense features; `constant` are those whose result is a buffer, `more` are rows of one whose
    result is added to the last one's."""

    def __init__(self, kind, sparse, batch, constant, more, rows):
        super().__init__()
        bag = kind == "bag"
        make = (
            (lambda n: nn.EmbeddingBag(n, WIDTH, mode="sum", sparse=sparse))
            if bag
            else (lambda n: nn.Embedding(n, WIDTH, sparse=sparse))
        )
        self.constant = constant
        self.tables = nn.ModuleDict({str(i): make(n) for i, n in enumerate(rows) if i not in constant})
        for i in constant:
            self.register_buffer(
                f"constant{i}", torch.zeros(batch, WIDTH) if bag else torch.zeros(batch, LOOKUPS, WIDTH)
            )
        self.more = make(more) if more else None
        self.bag = bag
        self.below, self.above = nn.Linear(16, WIDTH), nn.Linear((1 + len(ROWS)) * WIDTH, 1)

    def looked_up(self, i, lookups):
        found = getattr(self, f"constant{i}") if i in self.constant else self.tables[str(i)](lookups[i].cuda())
        if self.more is not None and i == len(ROWS) - 1:
            found = found + self.more(lookups[-1].cuda())
        return found if self.bag else found.mean(1)

    def forward(self, dense, lookups):
        found = [self.looked_up(i, lookups) for i in range(len(ROWS))]
        return self.above(torch.cat([self.below(dense), *found], 1))


def captured_tables(kind="bag", *, sparse=False, optimizer="sgd", constant=(), more=0, rows=ROWS, batch=64, clip=False):
    """A step of the model; lookups come from the host, those of tables that are there."""

    def make_step(batch_size):
        model = _Tables(kind, sparse, batch_size, constant, more, rows).cuda()
        steps = OPTIMIZERS[optimizer](model.parameters(), lr=0.01)
        dense = torch.empty(batch_size, 16, device="cuda")
        lookups = [torch.zeros(batch_size, LOOKUPS, dtype=torch.long) for _ in range(len(ROWS) + bool(more))]

        def step():
            steps.zero_grad()
            model(dense, lookups).square().mean().backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            steps.step()

        return step

    return capture_step(make_step, batch_size=batch, name="tables")


SETUPS = [
    ("bag", {"sparse": True}),
    ("bag", {"optimizer": "adam"}),
    ("embedding", {"sparse": True, "optimizer": "adagrad"}),
    ("embedding", {"optimizer": "adam"}),
]
EDITS = [("drop-table=1", {"constant": (1,)}), ("drop-table=0+tables.2", {"constant": (0, 2)}),
         ("add-table=300000x8", {"more": 300_000}), ("rows=x3", {"rows": (3000, 60_000, 1500)})]  # fmt: skip


@pytest.mark.parametrize(("kind", "options"), SETUPS)
def test_edited_tables_are_those_of_a_fresh_capture(kind, options):
    step = captured_tables(kind, **options)
    for edit, written in EDITS:
        fresh = captured_tables(kind, **options, **written)
        edited = edited_step(step, edit)
        validate_workload(edited)
        assert_same(edited, fresh, memory=0.0 if edit.startswith("rows") else 0.02)


@pytest.mark.parametrize(("edit", "written"), [EDITS[0], *EDITS[2:]])
def test_gradients_that_are_clipped_together_are_those_of_the_tables_left(edit, written):
    edited = edited_step(captured_tables(optimizer="adam", clip=True), edit)
    assert_same(edited, captured_tables(optimizer="adam", clip=True, **written))


def test_tables_of_a_capture_change_at_any_batch_size_and_with_other_edits():
    step = captured_tables(optimizer="adam")
    edits = ["drop-table=1", "add-table=300000x8", "batch-size=4096", "dtype=bf16", "compile"]
    result = traincast.whatif(step, on="a100-80gb", edits=edits)
    assert result.after.workload.batch_size == 4096
    larger = captured_tables(optimizer="adam", constant=(1,), more=300_000, batch=4096)
    plain = traincast.whatif(step, on="a100-80gb", edits=edits[:3]).after
    assert plain.iteration == pytest.approx(traincast.predict(larger, on="a100-80gb").iteration, rel=0.01)


def test_bags_whose_sparse_gradients_share_lookups_from_the_host_are_fused_too():
    step = captured_tables(sparse=True)
    edited = edited_step(step, "fuse-embedding-bags")
    validate_workload(edited)
    copies = [op for op in edited.programs[0].ops if op.signature.name == "aten::_to_copy"]
    assert len(copies) == 1  # the lookups of all tables come in one
    assert not any("_embedding_bag" in op.signature.name for op in edited.programs[0].ops)


@pytest.mark.parametrize(
    ("edit", "why"),
    [("drop-table=3", "its tables are 0: _Tables.tables.0"), ("drop-table=nothing", "20000 x 32"),
     ("drop-table=0+1+2", "one of them must stay"), ("add-table=100", "write 100x8")],
)  # fmt: skip
def test_tables_that_cannot_be_changed_say_why(edit, why):
    with pytest.raises(TraincastError, match=why):
        traincast.whatif(captured_tables(), on="a100-80gb", edits=[edit])


@pytest.mark.parametrize(
    ("name", "why"),
    [("resnet50", "has no tables"), ("bert-large", "word_embeddings.* are used by aten::t")],
)
def test_models_whose_tables_cannot_be_told_apart_are_refused(name, why):
    with pytest.raises(TraincastError, match=why):
        traincast.whatif(name, on="a100-80gb", edits=["drop-table=0"])


def test_rows_that_something_else_uses_too_are_named_with_it():
    def make_step(batch):
        table, free = nn.Embedding(5000, 64, device="cuda"), nn.Embedding(300, 64, device="cuda")
        ids = torch.zeros(batch, dtype=torch.long, device="cuda")
        return lambda: ((table(ids) + free(ids % 300)) @ table.weight.t()).sum().backward()

    step = capture_step(make_step, batch_size=8, name="scores of all items")
    with pytest.raises(TraincastError, match=r"rows of Embedding \(5000 x 64\): aten::t uses it too; capture"):
        traincast.fits(step, on="a100-80gb", max="rows")
