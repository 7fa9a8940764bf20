"""Every transform on several steps: a sound program, with the one it began with left alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from traincast.costs.kernels.registry import make_lowering_context
from traincast.ir import Phase, Program, Workload
from traincast.ir.editor import remove_phase, rename_dtypes
from traincast.ir.program import Columns
from traincast.ir.validate import validate_program
from traincast.models.catalog import load_model
from traincast.models.data_parallel import apply_data_parallel
from traincast.models.sharded_dlrm.recommender import build_sharded_recommender
from traincast.transforms.batching import batch_bags
from traincast.transforms.checkpointing import checkpoint_layers
from traincast.transforms.fusion import apply_cuda_graphs, compile_step, fuse_ops
from traincast.transforms.retyping.edit import with_autocast, with_weights
from traincast.transforms.table_edits import add_table, drop_tables
from traincast.transforms.updates import accumulate_gradients, change_optimizer, move_to_stream
from traincast.utils.errors import TraincastError

Transform = Callable[[Workload], Workload]
STEPS = {
    "bags": lambda: load_model("dlrm-default", embedding="bag"),
    "din": lambda: load_model("din").resized(batch_size=32),
    "vgg13": lambda: load_model("vgg13").resized(batch_size=4),
    "transformer": lambda: load_model("transformer").resized(batch_size=1),
}
TRANSFORMS: dict[str, Transform] = {
    "no optimizer": lambda step: remove_phase(step, Phase.OPTIMIZER),
    "no backward": lambda step: remove_phase(step, Phase.BACKWARD),
    "another type": lambda step: rename_dtypes(step, {"float32": "int32"}),
    "compiled": lambda step: compile_step(step, make_lowering_context(step)),
    "fused": lambda step: fuse_ops(step)[0],
    "graphs": lambda step: apply_cuda_graphs(step)[0],
    "accumulated": lambda step: accumulate_gradients(step, 3)[0],
    "batched bags": lambda step: batch_bags(step)[0],
    "checkpointed": lambda step: checkpoint_layers(step, "layers")[0],
    "another optimizer": lambda step: change_optimizer(step, "adam")[0],
    "another stream": lambda step: move_to_stream(step, "aten::addmm", 1)[0],
    "without a table": lambda step: drop_tables(step, ["0"])[0],
    "with a table": lambda step: add_table(step, 1000, 100)[0],
    "autocast": lambda step: with_autocast(step, "bfloat16")[0],
    "16 bits": lambda step: with_weights(step, "bfloat16")[0],
    "data parallel": lambda step: apply_data_parallel(step, 4),
    "sharded": lambda step: build_sharded_recommender(step, 2, memory_bytes=80e9, gpus_per_node=8)[0],
    "parallel, accumulated, compiled": lambda step: compile_step(
        accumulate_gradients(apply_data_parallel(step, 4), 2)[0], make_lowering_context(step)
    ),
}
REFUSED = {
    "bags": {"checkpointed", "another optimizer", "data parallel", "sharded", "parallel, accumulated, compiled"},
    "din": {"batched bags", "checkpointed", "data parallel", "parallel, accumulated, compiled"},
    "vgg13": {"batched bags", "checkpointed", "without a table", "with a table", "sharded"},
    "transformer": {"batched bags", "without a table", "with a table", "sharded"},
}
"""What makes no sense for a step: it says why."""


@cache
def load_step(name: str) -> Workload:
    return STEPS[name]()


def check_memory(program: Program) -> None:
    """No op touches memory before it is allocated; none is freed before the last use but what captures let go early."""
    c = program.columns
    for pointer, tensor in ((c.input_ptr, c.input_tensor), (c.output_ptr, c.output_tensor)):
        op = np.repeat(np.arange(program.num_ops), np.diff(pointer))
        storage = c.tensor_storage[tensor]
        assert np.all(c.storage_alloc[storage] <= op)
        assert np.all(op <= c.storage_free[storage] + 1)


@pytest.mark.parametrize("name", STEPS)
def test_every_transform_gives_a_sound_program_or_a_reason(name: str) -> None:
    # Given a step, when every transform is applied to it
    step = load_step(name)
    before = {column: getattr(step.programs[0].columns, column).copy() for column in Columns.names()}
    refused = set()
    for what, transform in TRANSFORMS.items():
        try:
            changed = transform(step)
        except TraincastError:
            refused.add(what)
            continue
        # Then each result is valid and has its memory where its ops need it
        for program in changed.programs:
            validate_program(program)
            check_memory(program)
    assert refused == REFUSED[name]
    # and the step itself is as it was
    columns = step.programs[0].columns
    assert all(np.array_equal(getattr(columns, column), values) for column, values in before.items())


@pytest.mark.parametrize("name", ["bags", "vgg13"])
def test_fused_and_compiled_chains_move_no_more_bytes_than_eager_ones(name: str) -> None:
    # Given a step, when its chains are fused, then no byte that an op reads or writes was not one before
    step = load_step(name)
    eager = moved_bytes(step.programs[0])
    for transform in ("fused", "compiled"):
        assert 0 < moved_bytes(TRANSFORMS[transform](step).programs[0]) < eager


def moved_bytes(program: Program) -> int:
    """Bytes of all tensors that ops read or write."""
    sizes = np.array([sum(spec.nbytes for spec in (*s.inputs, *s.outputs)) for s in program.signatures])
    return int(sizes[program.columns.op_signature].sum())
