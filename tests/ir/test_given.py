import pytest

from traincast.ir.formula import Formula, OpCost, read_op_costs
from traincast.ir.ops import Signature, TensorSpec
from traincast.utils.errors import TraincastError

OP = Signature(
    name="lib::op",
    inputs=(TensorSpec((4, 8), (8, 1), "float32", "cuda"), TensorSpec((8, 2), (2, 1), "float16", "cuda")),
    outputs=(TensorSpec((4, 2), (2, 1), "float32", "cuda"),),
    scalars=(("heads", 3), ("name", "x")),
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 * in0.numel * in1[-1]", 128), ("in0.bytes + in1.bytes + out0.bytes", 128 + 32 + 32), ("heads ** 2 - 1", 8),
        ("max(1e-5, 3 // 2)", 1), ("ceil(in0[0] / 3) + log2(8) + -1 + in0.ndim", 6),
    ],
)  # fmt: skip
def test_a_formula_has_its_value(text: str, value: float) -> None:
    assert Formula(text).of(OP) == value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')", "in0.__class__", "(lambda: 1)()", "[1][0]", "1 if 1 else 2", "x" * 600,
        "open('x')", "in0.numel.real", "1 +", "f'{1}'", "9 ** 9 ** 9", "in7.numel", "in0[5]", "name", "1 / 0", "0 - 1",
        "in0", "'a'",
    ],
)  # fmt: skip
def test_anything_else_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(TraincastError) as caught:
        Formula(text).of(OP)
    assert "\n" not in str(caught.value)


def test_costs_of_a_table_are_named_by_what_is_wrong_with_them() -> None:
    (cost,) = read_op_costs({"lib::op": {"flops": "2 * in0.numel", "bytes": 100}}, "costs.toml")
    assert cost.of(OP) == (0.0, 64.0, 100.0)
    for table, message in (
        ({"op": {"flops": "1"}}, "no name of an op"), ({"a::b": {"flop": "1"}}, "Did you mean flops"),
        ({"a::b": {}}, "says nothing"), ({"a::b": 3}, "must be a table"),
    ):  # fmt: skip
        with pytest.raises(TraincastError, match=message):
            read_op_costs(table, "costs.toml")


def test_a_function_of_python_gives_a_cost_too() -> None:
    assert OpCost("lib::op", seconds=lambda signature: 1e-3 * len(signature.inputs)).of(OP) == (2e-3, 0.0, 0.0)
