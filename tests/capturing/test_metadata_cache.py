"""Shapes of results are found out once, and remembering them changes no program."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from tests.capturing.sharded_steps import fsdp2, tensor_parallel
from tests.capturing.small_models import cnn, encoder
from tests.corpus.setups import trained
from traincast.capturing import capture_distributed, capture_step, shardings
from traincast.capturing.metadata_cache import MetadataCache, UnsupportedArgumentError
from traincast.ir.program import Columns

aten = torch.ops.aten


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


class Calls:
    """Runs ops through remembered forms, and counts those that really run."""

    def __init__(self):
        self.forms, self.run = MetadataCache(), 0

    def __call__(self, func, *args, **kwargs):
        return self.forms.call_op(func, args, kwargs, self._run)

    def _run(self, func, args, kwargs):
        self.run += 1
        return func(*args, **kwargs)


def form(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.untyped_storage().nbytes()


def test_an_op_on_the_same_forms_runs_once():
    calls = Calls()
    layer = (meta(4, 6), [6], meta(6), meta(6), 1e-5)
    first = calls(aten.native_layer_norm.default, *layer)
    second = calls(aten.native_layer_norm.default, *layer)
    # Then the second call did not run, and gave other tensors of the same forms
    assert calls.run == 1
    assert list(map(form, first)) == list(map(form, second))
    assert len({t.untyped_storage()._cdata for t in (*first, *second)}) == 6


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param((meta(3, dtype=torch.int64), 1), (meta(3, dtype=torch.int64), 1.0), id="a number of another type"),
        pytest.param((meta(3), meta(3)), (meta(3), meta(3, dtype=torch.float64)), id="another type of elements"),
        pytest.param((meta(3, 4), 1), (meta(4, 3).t(), 1), id="other strides"),
    ],
)
def test_calls_that_differ_are_not_mistaken_for_each_other(one, other):
    calls = Calls()
    for arguments in (one, other, one, other):
        assert form(calls(aten.add.Tensor, *arguments)) == form(aten.add.Tensor(*arguments))
    assert calls.run == 2


def test_the_default_type_counts():
    calls = Calls()
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            assert calls(aten.ones.default, [3], device=torch.device("meta")).dtype == dtype
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("func", "arguments"),
    [
        (aten.view.default, (meta(6), [2, 3])),
        (aten._unsafe_view.default, (meta(6), [2, 3])),  # its schema promises memory of its own
        (aten.add_.Tensor, (meta(6), meta(6))),
    ],
)
def test_what_shares_memory_with_its_arguments_always_runs(func, arguments):
    calls = Calls()
    for _ in range(2):
        made = calls(func, *arguments)
        assert made.untyped_storage()._cdata == arguments[0].untyped_storage()._cdata
    assert calls.run == 2


def complex_step(batch):
    weight = torch.nn.Parameter(torch.randn(8, 8, dtype=torch.complex64, device="cuda"))
    x = torch.randn(batch, 8, dtype=torch.complex64, device="cuda")
    return trained(torch.nn.ParameterList([weight]), lambda: (x @ weight).abs().mean(), torch.optim.SGD)


def contents(workload):
    return [
        (
            p.signatures,
            p.names,
            p.rigid,
            p.sizes.coefficients.tolist(),
            *(getattr(p.columns, n).tolist() for n in NAMES),
        )
        for p in workload.programs
    ]


NAMES = Columns.names()
STEPS = {
    "encoder": lambda: capture_step(lambda b, s: encoder(b, s, "cuda"), batch_size=2, seq_len=12, name="x"),
    "cnn": lambda: capture_step(lambda b: cnn(b, "cuda"), batch_size=4, name="x"),
    "complex": lambda: capture_step(complex_step, batch_size=4, name="x"),
}


@pytest.mark.parametrize("name", STEPS)
def test_programs_are_the_same_without_remembering(monkeypatch, name):
    remembered = STEPS[name]()
    monkeypatch.setattr(MetadataCache, "call_op", lambda self, func, args, kwargs, run: run(func, args, kwargs))
    assert contents(STEPS[name]()) == contents(remembered)


def test_shardings_are_found_once_and_change_no_program(monkeypatch):
    from torch.distributed.tensor._sharding_prop import ShardingPropagator as Propagator

    found = []
    find = Propagator.propagate_op_sharding_non_cached
    counted = lambda self, schema: found.append(schema.op) or find(self, schema)  # noqa: E731
    monkeypatch.setattr(Propagator, "propagate_op_sharding_non_cached", counted)

    def captured():
        found.clear()
        workload = capture_distributed(
            lambda batch, *, rank, world_size: fsdp2(rank, "cuda"), world_size=2, batch_size=4, name="x", rebatch=False
        )
        return contents(workload), len(found)

    # Given what a capture finds that asks PyTorch for every rank
    with monkeypatch.context() as without:
        without.setattr(shardings, "install_shardings", lambda *_: None)
        asked, times = captured()
    # Then one that remembers asks for the second rank only what has sizes of its own
    remembered, fewer = captured()
    assert remembered == asked
    assert 0 < fewer <= 0.7 * times


def test_forms_of_dtensors_are_those_that_fake_tensors_give(monkeypatch):
    def captured():
        return contents(capture_distributed(tensor_parallel, world_size=2, batch_size=4, name="x", rebatch=False))

    asked = []

    def unusual(schema):
        asked.append(schema.op)
        raise UnsupportedArgumentError

    directly = captured()
    monkeypatch.setattr(shardings, "_infer_metadata", unusual)
    assert captured() == directly
    assert len(asked) > 10
