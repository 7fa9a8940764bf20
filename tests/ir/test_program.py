from tests.ir.steps import make_mlp, spec
from traincast.ir import Phase, ProgramBuilder, Signature, StorageKind, compute_peak_memory
from traincast.ir.memory import UNTOUCHED

RELU = Signature("aten::relu", (spec(256),), (spec(256),))


def test_ops_and_scopes_read_back_what_was_built() -> None:
    program = make_mlp(batch=8, layers=2, width=16)
    assert [op.name for op in program.ops] == [
        "aten::_to_copy", "aten::mm", "aten::mm", "aten::sum", "aten::mm", "aten::mm", "aten::_foreach_add_",
    ]  # fmt: skip
    assert [scope.name for scope in program.scopes][-2:] == [
        "Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad",
    ]  # fmt: skip
    assert [op.scope for op in program.ops] == [0, 1, 2, 3, 4, 5, 6]
    assert program.scopes[7].num_ops == 0
    assert [op.forward for op in program.ops] == [-1, -1, -1, -1, 2, 1, -1]
    assert [op.thread for op in program.ops] == [0, 0, 0, 0, 1, 1, 0]
    assert program.ops[1].module == "layers.0"
    assert program.ops[1].inputs[0].spec.shape == (8, 16)
    assert program.op_phase.tolist() == [int(op.phase) for op in program.ops]


def test_a_signature_finds_its_arguments() -> None:
    update = make_mlp(batch=8, layers=3).ops[-1].signature
    assert len(update.tensors("self")) == len(update.tensors("other")) == 3
    assert update.tensors("absent") == ()
    assert update.scalar("alpha") == -0.1
    assert update.scalar("absent", 5) == 5


def chain(lengths: list[int], *, free_after: dict[int, int]) -> ProgramBuilder:
    """Op i allocates `lengths[i]` bytes; storage i is freed after op `free_after[i]`."""
    builder = ProgramBuilder(batch_size=1)
    builder.open_scope("aten::relu", Phase.FORWARD)
    before = builder.add_tensor(builder.add_storage(1024, StorageKind.PARAMETER, before_step=True))
    storages = []
    for i, nbytes in enumerate(lengths):
        storages.append(builder.add_storage(nbytes))
        builder.add_op(RELU, [before], [builder.add_tensor(storages[-1])])
        for storage, last in free_after.items():
            if last == i:
                builder.free_storage(storages[storage])
    return builder


def test_peak_memory_of_storages_that_replace_each_other() -> None:
    # Given 512, 1024 and 512 bytes, each freed after the op that follows it
    program = chain([512, 1024, 512], free_after={0: 1, 1: 2}).build_program()
    # Then the peak is at op 1: 1024 of parameters, 512 and 1024; at op 2 it is 1024 + 1024 + 512 as well
    assert compute_peak_memory(program).peak_bytes == 2560
    assert compute_peak_memory(program).by_kind == {"parameter": 1024, "activation": 1536}


def test_peak_memory_counts_what_is_never_freed() -> None:
    assert compute_peak_memory(chain([512, 512, 512], free_after={}).build_program()).peak_bytes == 1024 + 3 * 512


def test_a_storage_freed_after_its_own_op_leaves_before_the_next() -> None:
    assert compute_peak_memory(chain([4096, 512], free_after={0: 0}).build_program()).peak_bytes == 1024 + 4096
    assert compute_peak_memory(chain([4096, 4096], free_after={0: 0}).build_program()).peak_bytes == 1024 + 4096


def test_storages_take_whole_blocks_of_512_bytes() -> None:
    assert compute_peak_memory(chain([1, 513], free_after={}).build_program()).peak_bytes == 1024 + 512 + 1024


def test_host_memory_is_no_device_memory() -> None:
    # Given a host batch of 8 x 16 floats, its device copy, two weights and what the step computes
    program = make_mlp(batch=8, layers=2, width=16)
    assert program.storages.on_host.tolist() == [False, False, True] + [False] * (len(program.storages.on_host) - 3)
    # Then the peak is at the last gradient: 2 weights, 2 gradients of 1024 bytes; input copy, one activation,
    # the loss and the incoming gradient of 512 bytes each
    memory = compute_peak_memory(program)
    assert memory.by_kind == {"parameter": 2048, "gradient": 2048, "input": 512, "activation": 1024, "temporary": 512}
    assert memory.peak_bytes == 6144


def test_a_step_without_ops_holds_its_parameters() -> None:
    builder = ProgramBuilder(batch_size=1)
    builder.add_storage(2048, StorageKind.PARAMETER, before_step=True)
    assert compute_peak_memory(builder.build_program()).peak_bytes == 2048
    assert compute_peak_memory(ProgramBuilder(batch_size=1).build_program()).peak_bytes == 0


def test_what_no_op_touches_is_told_apart():
    builder = chain([512], free_after={})
    builder.add_storage(2048, StorageKind.INPUT, before_step=True)
    assert compute_peak_memory(builder.build_program()).by_module[UNTOUCHED] == 2048
