from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ir.steps import make_mlp
from traincast.ir import Program
from traincast.ir.generalise import capture_sizes, generalise_captures
from traincast.ir.program import Columns
from traincast.ir.validate import validate_program
from traincast.utils.errors import TraincastError


def general(batch: int, seq: int, **options) -> Program:
    return generalise_captures([make_mlp(batch=b, seq=s, **options) for b, s in capture_sizes(batch, seq)])


@given(batch=st.integers(1, 600), seq=st.integers(0, 5000))
def test_sizes_to_capture_at_determine_a_polynomial(batch: int, seq: int) -> None:
    pairs = capture_sizes(batch, seq)
    assert pairs[0] == (batch, seq)
    assert len(set(pairs)) == len(pairs) == (7 if seq else 3)
    assert all(b >= 1 and (s >= 1 or not seq) for b, s in pairs)
    assert len({s for _, s in pairs[:-1]}) == (3 if seq else 1)
    assert len({b for b, _ in pairs[:-1]}) == 2


@settings(deadline=None, max_examples=40)
@given(
    at=st.tuples(st.integers(1, 300), st.integers(0, 40)),
    other=st.tuples(st.integers(1, 5000), st.integers(1, 900)),
    c=st.lists(st.integers(-50, 50), min_size=6, max_size=6),
)
def test_another_size_is_what_a_capture_there_would_be(
    at: tuple[int, int], other: tuple[int, int], c: list[int]
) -> None:
    # Given a step whose sizes are polynomials, captured around one size
    def extra(b: int, s: int) -> int:
        return c[0] + c[1] * b + c[2] * s + c[3] * b * s + c[4] * s * s + c[5] * b * s * s

    program = general(*at, extra=extra)
    # When it is resized to another
    batch, seq = other[0], other[1] if at[1] else 0
    resized = program.resized(batch, seq)
    # Then it equals a capture at that size, in every signature and every storage
    direct = make_mlp(batch=batch, seq=seq, extra=extra)
    assert [op.signature for op in resized.ops] == [op.signature for op in direct.ops]
    assert resized.storage_nbytes.tolist() == direct.storage_nbytes.tolist()
    validate_program(resized)


def test_the_size_captured_at_comes_back_unchanged() -> None:
    program, direct = general(8, 128), make_mlp(batch=8, seq=128)
    assert program.ops == direct.ops


@pytest.mark.parametrize(
    "extra",
    [
        lambda b, s: b * b,
        lambda b, s: s**3,
        lambda b, s: b // 2,
        lambda b, s: -(-b // 8) * 8,
        lambda b, s: 1 << (b % 50),
        lambda b, s: s // 2,
        lambda b, s: hash((b, s)) % (1 << 60),
    ],
)
@pytest.mark.parametrize(("batch", "seq"), [(16, 64), (5, 12), (32, 2048)])
def test_what_is_no_polynomial_is_refused(extra: Callable[[int, int], int], batch: int, seq: int) -> None:
    with pytest.raises(TraincastError, match="no polynomial"):
        general(batch, seq, extra=extra)


@pytest.mark.parametrize("multiple", [8, 32, 128])
@pytest.mark.parametrize("seq", [504, 512, 1000, 2048])
def test_a_length_that_a_kernel_pads_is_followed(seq: int, multiple: int) -> None:
    # Given a kernel that keeps one number per row, rows padded to a multiple, as attention's log-sum-exp
    def extra(b: int, s: int) -> int:
        return b * 12 * (-(-s // multiple) * multiple)

    program = general(4, seq, extra=extra)
    # Then at every other length it is padded as the kernel would
    for batch, length in ((1, 1), (3, 77), (16, 4096), (5, 4097)):
        assert program.resized(batch, length).ops == make_mlp(batch=batch, seq=length, extra=extra).ops


@pytest.mark.parametrize("batch", range(1, 40))
def test_half_a_batch_is_refused(batch: int) -> None:
    with pytest.raises(TraincastError, match="no polynomial"):
        general(batch, 0, extra=lambda b, s: b // 2)


@pytest.mark.parametrize("seq", range(1, 130))
def test_half_a_length_is_refused(seq: int) -> None:
    with pytest.raises(TraincastError, match="no polynomial"):
        general(2, seq, layers=1, extra=lambda b, s: (s + 1) // 2)


def test_a_step_that_changes_its_ops_is_refused() -> None:
    captures = [make_mlp(batch=b, layers=2 if b < 20 else 3) for b, _ in capture_sizes(16, 0)]
    with pytest.raises(TraincastError, match="runs other ops at batch 25"):
        generalise_captures(captures)


def test_an_op_that_changes_its_form_is_refused() -> None:
    captures = [make_mlp(batch=b, extra=(lambda b, s: 1) if b < 20 else None) for b, _ in capture_sizes(16, 0)]
    with pytest.raises(TraincastError, match="aten::mm changes its form"):
        generalise_captures(captures)


def test_a_fractional_size_that_is_exact_everywhere_is_kept() -> None:
    # Given b * s * (s + 1) / 2, whole although its coefficients are halves
    program = general(4, 32, extra=lambda b, s: b * s * (s + 1) // 2)
    assert program.resized(3, 101).ops[1].signature.scalar("extra") == 3 * 101 * 102 // 2


def test_storages_may_be_made_in_another_order_at_other_sizes() -> None:
    # Given captures of which the second has its storages in another order, as threads that load weights make them
    captures = [make_mlp(batch=batch) for batch in (8, 5, 13)]
    c = captures[1].columns
    order = np.random.default_rng(29).permutation(len(c.storage_bytes))
    place = np.argsort(order).astype(np.int32)
    stored = {name: getattr(c, name)[order] for name in Columns.names() if name.startswith("storage_")}
    shuffled = replace(captures[1], columns=replace(c, tensor_storage=place[c.tensor_storage], **stored))
    # When they are generalised
    made = generalise_captures([captures[0], shuffled, captures[2]])
    # Then the result is that of captures in one order
    expected = generalise_captures(captures)
    assert all(np.array_equal(getattr(made.columns, name), getattr(expected.columns, name)) for name in Columns.names())
    assert made.resized(20, 0).storage_nbytes.tolist() == expected.resized(20, 0).storage_nbytes.tolist()
