from tests.ir.steps import spec
from traincast.ir import Phase, ProgramBuilder, Signature
from traincast.ir.sizes import SizeRef, replace_indices_by_sizes, replace_sizes_by_indices, separate_forms_and_sizes


def with_scalar(value) -> Signature:
    return Signature("aten::mul", (spec(2, 3),), (spec(2, 3),), (("other", value),), (("self", 1),))


def test_a_signature_returns_from_indices_unchanged() -> None:
    # Given scalars of every kind, nested
    plain = with_scalar((1, 2.0, True, None, "mean", (3, (4, False))))
    sizes: list[int] = []

    def store(size: int) -> int:
        sizes.append(size)
        return len(sizes) - 1

    # When its integers become indices and come back
    symbolic = replace_sizes_by_indices(plain, store)
    back = replace_indices_by_sizes([symbolic], sizes)[0]
    # Then nothing is lost, not even the difference between 1, 1.0 and True
    assert repr(back) == repr(plain)
    assert sizes == [2, 3, 3, 1, 2, 3, 3, 1, 1, 3, 4]


def test_a_size_reference_equals_no_plain_number() -> None:
    assert SizeRef(1) == SizeRef(1)
    assert SizeRef(1) != 1.0
    assert SizeRef(1) != True  # noqa: E712
    assert len({SizeRef(1), 1.0, SizeRef(2)}) == 3


def test_an_integer_argument_is_not_mistaken_for_an_equal_float() -> None:
    # Given a step that multiplies by the float 0.0 .. 3.0 and by integers whose indices are those numbers
    builder = ProgramBuilder(batch_size=1)
    builder.open_scope("aten::mul", Phase.FORWARD)
    tensor = builder.add_tensor(builder.add_storage(24))
    values = [0.0, 1.0, 2.0, 3.0, 7, 8, 9, 10]
    for value in values:
        builder.add_op(with_scalar(value), [tensor], [tensor])
    # Then every op keeps its own argument
    assert [op.signature.scalar("other") for op in builder.build_program().ops] == values


def test_the_form_of_a_signature_is_free_of_sizes() -> None:
    small, large = with_scalar(2), with_scalar(70)
    (small_form, _), (large_form, sizes) = separate_forms_and_sizes([small, large])
    assert small_form == large_form
    assert sizes == (2, 3, 3, 1, 2, 3, 3, 1, 70)
    (whole, _), (real, _) = separate_forms_and_sizes([with_scalar(0), with_scalar(0.0)])
    assert whole != real
