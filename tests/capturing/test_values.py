"""Values that a script makes itself are known while it is captured; those that a model computes are not."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from traincast.capturing import capture_step
from traincast.utils.errors import TraincastError


def seen(make):
    """What `make(batch)` returns on pretended tensors, and the ops of its step."""
    values = []
    program = capture_step(
        lambda batch: lambda: values.append(make(batch)), batch_size=6, name="x", rebatch=False
    ).programs[0]
    return values[-1], [op.name for op in program.ops]


KNOWN = {
    "a mask of ones": lambda b: bool(torch.ones(b, 4, dtype=torch.long, device="cuda").all()),
    "positions": lambda b: torch.arange(b, device="cuda").tolist(),
    "lengths copied from the host": lambda b: torch.tensor([3, 1, 2]).cuda().cumsum(0).tolist(),
    "a mask that is selected with": lambda b: tuple(
        torch.randn(b, 5, device="cuda")[torch.arange(b, device="cuda") > 1].shape
    ),
    "places of a mask": lambda b: torch.nonzero(torch.tensor([0, 1, 1], device="cuda")).tolist(),
    "a count as a size": lambda b: tuple(torch.zeros(int(torch.arange(b, device="cuda").sum()), device="cuda").shape),
    "a view written into": lambda b: _written(b),
    "a causal mask": lambda b: bool(
        (torch.ones(b, b, device="cuda").tril() == torch.ones(b, b, device="cuda").tril()).all()
    ),
    "a copy in host memory": lambda b: torch.zeros(b, dtype=torch.long).copy_(torch.arange(b, device="cuda")).tolist(),
    "repeats": lambda b: torch.repeat_interleave(torch.tensor([2, 0, 1], device="cuda")).tolist(),
    "distinct values": lambda b: torch.unique(torch.tensor([5, 5, 2], device="cuda")).tolist(),
    "no number is broken": lambda b: bool(torch.isnan(torch.randn(b, device="cuda")).any()),
    "all numbers are finite": lambda b: bool(torch.isfinite(torch.randn(b, device="cuda").sum())),
}


def _written(batch):
    table = torch.zeros(batch, 3, dtype=torch.long, device="cuda")
    table[1] = 7
    table[:, 2].add_(torch.arange(batch, device="cuda"))
    return table.tolist()


@pytest.mark.parametrize("name", KNOWN)
def test_what_a_script_makes_is_known_as_in_a_real_run(name, monkeypatch):
    captured, _ = seen(KNOWN[name])

    # Then it is what the same code gives on the CPU
    for maker in ("ones", "arange", "zeros", "randn", "tensor"):
        original = getattr(torch, maker)
        monkeypatch.setattr(torch, maker, lambda *a, _make=original, device=None, **k: _make(*a, **k))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    assert captured == KNOWN[name](6)


def test_what_one_side_decides_is_known_whatever_the_other_is():
    """As generation ends at its longest: `unfinished & ~(at_the_end | is_end_of_sequence)`."""

    def ended(batch, at_the_end):
        sampled = torch.randn(batch, device="cuda").argsort() == 2
        stop = torch.full((batch,), at_the_end, device="cuda") | sampled
        unfinished = torch.randn(batch, device="cuda").long() & ~stop
        return bool(unfinished.max() == 0)

    assert seen(lambda batch: ended(batch, True))[0]
    with pytest.raises(TraincastError, match="needs the values of a tensor"):
        seen(lambda batch: ended(batch, False))


def test_asking_waits_for_the_device():
    assert "aten::_local_scalar_dense" in seen(KNOWN["a mask of ones"])[1]
    assert seen(KNOWN["positions"])[1][-1] == "aten::_to_copy"


UNKNOWN = {
    "computed by the model": lambda b: (torch.randn(b, device="cuda") > 0).tolist(),
    "uninitialised": lambda b: torch.empty(b, dtype=torch.long, device="cuda").tolist(),
    "overwritten": lambda b: (
        torch.zeros(b, dtype=torch.long, device="cuda").copy_(torch.randn(b, device="cuda")).tolist()
    ),
    "partly overwritten": lambda b: _spoilt(b).tolist(),
    "too large to keep": lambda b: torch.zeros(1 << 24, dtype=torch.long, device="cuda").tolist(),
}


def _spoilt(batch):
    table = torch.zeros(batch, 3, dtype=torch.long, device="cuda")
    table[0] = torch.randn(3, device="cuda")
    return table


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_refused(name):
    with pytest.raises(TraincastError, match="needs the values of a tensor"):
        seen(UNKNOWN[name])


def test_what_a_script_draws_is_the_same_in_every_capture():
    def draw(batch):
        return torch.randint(0, 100, (batch,), device="cuda").tolist()

    assert seen(draw)[0] == seen(draw)[0]
    assert len(set(seen(draw)[0])) > 1


def test_a_sparse_gradient_may_be_zeroed_in_place():
    def make_step(batch_size):
        bag = torch.nn.EmbeddingBag(50, 4, mode="sum", sparse=True, device="cuda")
        indices, offsets = (
            torch.arange(2 * batch_size, device="cuda"),
            torch.arange(0, 2 * batch_size, 2, device="cuda"),
        )
        optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)

        def step():
            optimizer.zero_grad(set_to_none=False)
            bag(indices, offsets).sum().backward()
            optimizer.step()

        return step

    ops = [op.name for op in capture_step(make_step, batch_size=4, name="sparse", rebatch=False).programs[0].ops]
    assert "aten::zero_" in ops and "aten::_embedding_bag_backward" in ops


@pytest.mark.parametrize("pins", [False, True])
def test_batches_of_a_loader_keep_their_values_pinned_or_not(pins):
    found = []

    def make_step(batch):
        data = [(torch.ones(5, dtype=torch.int64), number) for number in range(1000)]
        batches = iter(torch.utils.data.DataLoader(data, batch_size=batch, pin_memory=pins))

        def step():
            mask, number = next(batches)
            found.append((bool(mask.to("cuda", non_blocking=True).bool().all()), number.tolist()))

        return step

    capture_step(make_step, batch_size=4, name="x", rebatch=False)
    assert found[:2] == [(True, list(range(4))), (True, list(range(4, 8)))]


def test_memory_that_nothing_was_written_to_has_no_values():
    with pytest.raises(TraincastError, match="needs the values of a tensor"):
        seen(lambda batch: torch.empty_like(torch.ones(batch, dtype=torch.long, device="cuda")).tolist())


def test_what_distributions_check_is_taken_to_be_valid():
    shape, ops = seen(
        lambda b: tuple(
            torch.distributions.Categorical(logits=torch.randn(b, 3, device="cuda"), validate_args=True).sample().shape
        )
    )
    assert shape == (6,) and "aten::_is_all_true" in ops


@pytest.mark.parametrize(
    "use",
    [
        lambda n, layers: layers[n], lambda n, layers: layers[int(n)], lambda n, layers: layers[round(n / 2)],
        lambda n, layers: layers[len(range(n))], lambda n, layers: layers[2**n > 1], lambda n, layers: {0: 1}.get(n, 2),
        lambda n, layers: layers[max(n, 0)], lambda n, layers: layers[n >> 1],
    ],
)  # fmt: skip
def test_a_whole_number_of_the_device_decides_nothing_in_the_step(use):
    def make_step(batch):
        x = torch.rand(batch, 8, device="cuda")
        return lambda: use(x.argmax().item(), [x.sin, x.cos])

    with pytest.raises(TraincastError, match="needs the values of a tensor"):
        capture_step(make_step, batch_size=4, name="x", rebatch=False)


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (lambda x: x.item() > 0.1, "a fraction read from a tensor decides as 0.0 would"),
        (lambda x: x.argmax().item() / 3 > 0.1, "a fraction read from a tensor decides as 0.0 would"),
        (lambda x: float(x) > 0.1, "a fraction read from a tensor is taken to be 0.0"),
        (lambda x: float(f"{x:.3f}") > 0.1, "numbers of tensors that are printed are taken to be 0"),
    ],
)
def test_fractions_that_decide_are_told(use, told):
    def make_step(batch):
        x = torch.rand(batch, 8, device="cuda")
        return lambda: x.sin() if use(x.mean()) else x.cos()

    workload = capture_step(make_step, batch_size=4, name="x", rebatch=False)
    assert any(told in text for text in workload.assumptions)
    assert "aten::cos" in {op.name for op in workload.programs[0].ops}


def test_checks_pass_and_what_the_user_catches_is_rejected_all_the_same():
    def make_checked(batch):
        x = torch.rand(batch, 8, device="cuda")

        def step():
            assert (x > 0).all()
            if not (x < 2).all():
                raise ValueError
            if (x > 3).any():
                raise ValueError
            return x.sin()

        return step

    assert capture_step(make_checked, batch_size=4, name="x", rebatch=False).programs[0].num_ops

    def make_caught(batch):
        x = torch.rand(batch, 8, device="cuda")

        def step():
            try:
                x[x > 0].sin()
            except Exception:
                x.cos()

        return step

    with pytest.raises(TraincastError, match="mask=SHARE"):
        capture_step(make_caught, batch_size=4, name="x", rebatch=False)


def test_numpy_and_constructors_take_tensors_without_data():
    def make_step(batch):
        order = np.argsort(torch.arange(100_000).flip(0))
        assert order[0] == 99_999
        x = torch.rand(batch, 8, device="cuda")
        return lambda: torch.tensor([x.mean(), x.sum()], device="cuda").sum() + x.sum()

    assert capture_step(make_step, batch_size=4, name="x", rebatch=False).programs[0].num_ops
