"""What a compiler makes of an eager step."""

from __future__ import annotations

import pytest

from tests.ir.steps import spec
from traincast.app.api import load, predict
from traincast.costs.kernels.contract import KernelCall
from traincast.costs.kernels.lower import lower
from traincast.costs.kernels.registry import LoweringContext
from traincast.ir import Phase, Program, ProgramBuilder, Signature, StorageKind, Workload, compute_peak_memory
from traincast.ir.ops import Scalar, TensorSpec
from traincast.ir.validate import validate_workload
from traincast.transforms.fusion import FUSED, compile_step

CONTEXT = LoweringContext()
X = spec(64, 256)


class StepBuilder:
    """Ops one after the other; a name stands for a tensor on a storage of its own."""

    def __init__(self, *given: str) -> None:
        self.builder = ProgramBuilder(batch_size=64)
        self.storages: dict[str, int] = {}
        self.tensors: dict[str, int] = {}
        for name in given:
            self.make(name, X.nbytes, before_step=True)

    def make(self, name: str, nbytes: int, *, before_step: bool = False) -> None:
        """A tensor that the next op allocates, or that is there before the step."""
        kind = StorageKind.INPUT if before_step else StorageKind.ACTIVATION
        self.storages[name] = self.builder.add_storage(nbytes, kind, before_step=before_step)
        self.tensors[name] = self.builder.add_tensor(self.storages[name])

    def run(self, op: str, reads: str, writes: str, out: TensorSpec = X, **scalars: Scalar) -> StepBuilder:
        """Adds `aten::op`; a result that is also read is written in place."""
        self.builder.open_scope(f"aten::{op}", Phase.FORWARD)
        for name in writes.split():
            if name not in self.tensors:
                self.make(name, X.nbytes)
        inputs = tuple(X for _ in reads.split())
        signature = Signature(f"aten::{op}", inputs, (out,), tuple(scalars.items()))
        self.builder.add_op(
            signature, [self.tensors[name] for name in reads.split()], [self.tensors[name] for name in writes.split()]
        )
        return self

    def compiled(self, *results: str) -> Program:
        """The compiled program; all but `results` is freed at its end."""
        for name, storage in self.storages.items():
            if name not in results:
                self.builder.free_storage(storage)
        workload = Workload(name="w", programs=(self.builder.build_program(),), mode="inference")
        step = compile_step(workload, CONTEXT)
        validate_workload(step)
        return step.programs[0]


def kernels(program: Program) -> list[str]:
    return [str(dict(op.signature.scalars).get("ops", op.name)) for op in program.ops]


def test_a_chain_reads_what_comes_in_and_writes_what_goes_out() -> None:
    # Given four element-wise ops in a row, of which the last is the result
    builder = (
        StepBuilder("x", "y").run("mul", "x y", "a").run("tanh", "a", "b").run("add", "b x", "c").run("relu", "c", "d")
    )
    # When compiled, then one kernel reads x and y once and writes d
    program = builder.compiled("d")
    assert kernels(program) == ["mul tanh add relu"]
    (call,) = lower(program.signatures[0], CONTEXT)
    assert isinstance(call, KernelCall)
    assert dict(zip(call.family.fields, call.values, strict=True)) == {
        "elements": X.numel, "bytes_read": 2 * X.nbytes, "bytes_written": X.nbytes, "tensors": 3
    }  # fmt: skip


def test_a_result_used_elsewhere_is_written_too() -> None:
    builder = (
        StepBuilder("x", "w").run("mul", "x x", "a").run("tanh", "a", "b").run("mm", "b w", "c").run("add", "c a", "d")
    )
    program = builder.compiled("d")
    assert kernels(program) == ["mul tanh", "aten::mm", "aten::add"]
    assert len(program.ops[0].outputs) == 2


def test_what_has_been_used_outside_takes_no_more_ops() -> None:
    """The product needs the first op's result, so the last op, which needs the product, cannot run with the first."""
    builder = StepBuilder("x", "w").run("relu", "x", "a").run("mm", "a w", "b").run("mul", "a b", "c")
    assert kernels(builder.compiled("c")) == ["aten::relu", "aten::mm", "aten::mul"]


def test_branches_of_a_formula_join() -> None:
    """GPT-2's GELU: half of x, and a polynomial of x, multiplied in the end."""
    builder = StepBuilder("x").run("mul", "x", "h").run("pow", "x", "p").run("tanh", "p", "t").run("mul", "h t", "g")
    assert kernels(builder.compiled("g")) == ["mul pow tanh mul"]


def test_softmax_takes_its_scaling_and_mask_along() -> None:
    builder = StepBuilder("x", "m").run("div", "x", "a").run("add", "a m", "b").run("_softmax", "b", "c", dim=-1)
    assert kernels(builder.compiled("c")) == ["div add _softmax"]


def test_reductions_to_unlike_rows_stay_apart() -> None:
    builder = StepBuilder("x").run("_softmax", "x", "a", dim=-1).run("_softmax", "a", "b", dim=0)
    assert kernels(builder.compiled("b")) == ["aten::_softmax", "aten::_softmax"]


def test_an_op_on_row_sums_runs_with_the_sums() -> None:
    sums = spec(64)
    builder = StepBuilder("x").run("tanh", "x", "a").run("sum", "a", "s", out=sums, dim=(1,))
    builder.builder.open_scope("aten::sqrt", Phase.FORWARD)
    builder.make("r", sums.nbytes)
    builder.builder.add_op(Signature("aten::sqrt", (sums,), (sums,)), [builder.tensors["s"]], [builder.tensors["r"]])
    assert kernels(builder.compiled("r")) == ["tanh sum sqrt"]


def test_in_place_ops_are_part_of_the_chain() -> None:
    builder = StepBuilder("x", "y").run("mul", "x y", "a").run("relu_", "a", "a").run("add_", "a y", "a")
    program = builder.compiled("a")
    assert kernels(program) == ["mul relu_ add_"]
    assert [len(program.ops[0].inputs), len({t.storage for t in program.ops[0].outputs})] == [2, 1]


def test_a_buffer_of_the_model_changed_in_place_is_written() -> None:
    program = StepBuilder("x", "running").run("mul", "x", "a").run("add_", "running a", "running").compiled()
    assert kernels(program) == ["mul add_"]
    assert len(program.ops[0].outputs) == 1


def test_memory_of_what_stays_inside_a_kernel_is_never_taken() -> None:
    builder = StepBuilder("x").run("mul", "x", "a").run("tanh", "a", "b").run("relu", "b", "c")
    assert compute_peak_memory(builder.compiled("c")).peak_bytes == 2 * X.nbytes


@pytest.mark.parametrize("model", ["gpt2-large", "bert-large", "dlrm-default", "resnet50", "opt-1.3b"])
def test_built_in_models_get_faster_and_keep_their_calls(model: str) -> None:
    eager, compiled = (predict(model, on="a100-40gb", mode="inference", compiled=choice) for choice in (False, True))
    assert compiled.device_active <= eager.device_active
    assert compiled.iteration <= eager.iteration * (1 + 1e-9)
    assert compiled.memory.peak_bytes <= eager.memory.peak_bytes
    for family in ("gemm", "conv", "embedding", "memcpy"):
        assert compiled.by_family.get(family) == pytest.approx(eager.by_family.get(family))
    assert not compiled.estimated_ops
    assert any(warning.startswith("compiled") for warning in compiled.warnings)


def test_a_compiled_step_can_change_its_batch() -> None:
    small = compile_step(load("gpt2-large", batch_size=2, seq_len=128, mode="inference"), CONTEXT)
    other = compile_step(load("gpt2-large", batch_size=4, seq_len=256, mode="inference"), CONTEXT)
    resized = small.resized(batch_size=4, seq_len=256)
    assert [op.signature for op in resized.programs[0].ops] == [op.signature for op in other.programs[0].ops]
    assert any(op.name == FUSED for op in resized.programs[0].ops)


def test_compiling_twice_changes_nothing() -> None:
    once = compile_step(load("bert-large", mode="inference"), CONTEXT)
    assert compile_step(once, CONTEXT) is once


def test_a_training_step_is_compiled_where_its_model_runs() -> None:
    # Given a step of training, compiled
    eager, compiled = (load("din", compiled=one).programs[0] for one in (False, True))

    # Then the model and its backward pass run fewer ops, and loss, update and gradients of parameters all theirs
    phases = [program.op_phase.tolist() for program in (eager, compiled)]
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert phases[1].count(phase) < phases[0].count(phase)
    for phase in (Phase.LOSS, Phase.OPTIMIZER):
        assert phases[1].count(phase) == phases[0].count(phase)
    kept = [sum(scope.name.endswith("AccumulateGrad") and scope.num_ops > 0 for scope in program.scopes)
            for program in (eager, compiled)]  # fmt: skip
    assert kept[0] == kept[1]
