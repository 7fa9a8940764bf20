"""FSDP and ZeRO without torch, against captures of the same models under `fully_shard`."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from traincast.capturing import capture_distributed, capture_step
from traincast.hardware.platform import add_default_links, load_platform
from traincast.ir import compute_peak_memory
from traincast.ir.ops import Phase
from traincast.ir.validate import validate_workload
from traincast.models.data_parallel import Sharding, apply_data_parallel, share_step
from traincast.simulator.prediction.prediction import predict_step
from traincast.transforms.updates import accumulate_gradients
from traincast.utils.errors import TraincastError

GPUS, WIDTH, LAYERS = 4, 64, 3
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def make_step(batch, wrap, optimizer, *, half=False, set_to_none=True, width=WIDTH):
    with torch.device("cuda"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)))
        x = torch.randn(batch, width)
    wrap(model)
    update = {"sgd": torch.optim.SGD, "adam": torch.optim.AdamW}[optimizer](model.parameters(), lr=0.1)

    def step():
        update.zero_grad(set_to_none=set_to_none)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
            loss = model(x).sum()
        loss.backward()
        update.step()

    return step


def one(optimizer="adam", *, batch=8, **options):
    return capture_step(
        lambda size: make_step(size, lambda model: None, optimizer, **options),
        batch_size=batch, name="x", rebatch=False,
    )  # fmt: skip


def captured(optimizer="adam", *, batch=8, width=WIDTH, **options):
    def wrap(model):
        for layer in model:
            fully_shard(layer, **options)
        fully_shard(model, **options)

    def make(batch, *, rank, world_size):
        return make_step(batch, wrap, optimizer, width=width)

    return capture_distributed(make, world_size=GPUS, batch_size=batch, name="x", ranks=[0], rebatch=False)


def collectives(workload):
    """Kind and bytes of every collective, in the order in which they are issued."""
    ops = workload.programs[0].ops
    return [(o.signature.scalar("collective"), o.signature.scalar("bytes")) for o in ops if o.name.startswith("c10d::")]


def updates(workload):
    """Name and forms of every op of the update."""
    ops = [op for op in workload.programs[0].ops if op.phase == Phase.OPTIMIZER]
    lists = [op for op in ops if op.name.startswith("aten::_foreach")]
    return [(op.name, [tensor.spec.shape for tensor in op.inputs]) for op in lists]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_fsdp_sends_and_updates_what_a_capture_of_it_records(optimizer):
    # Given a step captured on one GPU, and the same step captured under fully_shard
    expected = captured(optimizer)

    # When the first is shared without torch
    made = share_step(one(optimizer), GPUS, Sharding(3))

    # Then the same bytes are gathered and reduced in the same order, and the same shards are updated
    validate_workload(made)
    assert made.ranks == (0,) * GPUS
    assert collectives(made) == collectives(expected)
    assert updates(made) == updates(expected)


def test_fsdp_takes_as_long_as_a_capture_of_it():
    # Given layers large enough that kernels and links decide, not the host
    sizes, platform = {"batch": 4096, "width": 4096}, add_default_links(load_platform("dgx-h100"))

    # When both steps are simulated
    made = predict_step(share_step(one(**sizes), GPUS, Sharding(3)), platform)
    expected = predict_step(captured(**sizes), platform)

    # Then they agree
    assert made.iteration == pytest.approx(expected.iteration, rel=0.03)


def test_fsdp_keeps_as_much_memory_as_a_capture_of_it():
    sizes = {"batch": 4096, "width": 4096}
    made = compute_peak_memory(share_step(one(**sizes), GPUS, Sharding(3)).programs[0])
    expected = compute_peak_memory(captured(**sizes).programs[0])
    assert made.by_kind["optimizer_state"] == expected.by_kind["optimizer_state"]
    assert made.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.01)


def test_autocast_becomes_the_mixed_precision_of_fsdp():
    # Given a step under autocast, and FSDP with parameters in bfloat16 and gradients reduced in fp32
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    expected = captured(mp_policy=policy)

    # When the first is shared
    made = share_step(one(half=True), GPUS, Sharding(3))

    # Then parameters are gathered in two bytes and no pass casts them any more
    assert collectives(made) == collectives(expected)
    casts = [op for op in made.programs[0].ops if op.name == "aten::_to_copy" and op.phase == Phase.FORWARD]
    assert {tensor.spec.shape for op in casts for tensor in op.inputs} == {(8, WIDTH)}


def test_without_resharding_parameters_are_gathered_once():
    kept = collectives(share_step(one(), GPUS, Sharding(3, reshard=False)))
    assert kept == [("all_gather", LAYER_BYTES)] * LAYERS + [("reduce_scatter", LAYER_BYTES)] * LAYERS


def test_the_next_layer_is_gathered_while_a_layer_runs():
    # When a step is fully sharded
    program = share_step(one(), GPUS, Sharding(3)).programs[0]

    # Then the second gather is issued before the first layer runs, on a stream of its own
    names = [op.name for op in program.ops if op.phase == Phase.FORWARD]
    assert names[: names.index("aten::addmm")].count("c10d::_allgather_base_") == 2
    streams = {op.name: op.stream for op in program.ops if op.name in ("c10d::_allgather_base_", "aten::addmm")}
    assert streams["c10d::_allgather_base_"] != streams["aten::addmm"] == 0


@pytest.mark.parametrize("zero", [1, 2])
def test_a_shared_update_reduces_and_gathers_everything_once(zero):
    made = share_step(one(), GPUS, Sharding(zero))
    validate_workload(made)
    assert collectives(made) == [("reduce_scatter", LAYERS * LAYER_BYTES), ("all_gather", LAYERS * LAYER_BYTES)]
    assert updates(made) == updates(captured())


def lasting(workload):
    """Bytes of parameters, gradients and optimizer state that are there after the step."""
    program, sums = workload.programs[0], {}
    c = program.columns
    for storage, nbytes in enumerate(program.storage_nbytes.tolist()):
        if c.storage_free[storage] >= program.num_ops:
            sums[int(c.storage_kind[storage])] = sums.get(int(c.storage_kind[storage]), 0) + nbytes
    return [sums.get(kind, 0) for kind in range(3)]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_memory_is_divided_as_ranks_share(set_to_none):
    # Given a step of one GPU
    step = one("sgd", set_to_none=set_to_none)
    parameters, gradients, _ = lasting(step)
    assert parameters == gradients == LAYERS * LAYER_BYTES

    # When ranks share ever more, then they keep ever less
    assert lasting(share_step(step, GPUS, Sharding(2)))[:2] == [parameters, gradients // GPUS]
    assert lasting(share_step(step, GPUS, Sharding(3)))[:2] == [parameters // GPUS, gradients // GPUS]
    adam = one("adam", set_to_none=set_to_none)
    state = lasting(adam)[2]
    assert lasting(share_step(adam, GPUS, Sharding(1)))[2] == pytest.approx(state / GPUS, abs=100)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_only_fsdp_reduces_in_every_pass(set_to_none):
    # Given a step of three passes
    step, _ = accumulate_gradients(one(set_to_none=set_to_none), 3)

    # When ranks share it
    counts = {}
    for zero in (1, 2, 3):
        made = share_step(step, GPUS, Sharding(zero))
        validate_workload(made)
        kinds = [kind for kind, _ in collectives(made)]
        counts[zero] = (kinds.count("reduce_scatter"), kinds.count("all_gather"))

    # Then FSDP gathers and reduces in every pass, the others once
    assert counts == {1: (1, 1), 2: (1, 1), 3: (3 * LAYERS, 2 * 3 * LAYERS)}


def test_hybrid_sharding_reduces_shards_between_groups():
    made = share_step(one(), GPUS, Sharding(3, group=2))
    validate_workload(made)
    shards = [nbytes for kind, nbytes in collectives(made) if kind == "all_reduce"]
    assert shards == [LAYER_BYTES // 2] * LAYERS
    groups = {o.signature.scalar("group") for o in made.programs[0].ops if o.name.startswith("c10d::")}
    assert groups == {(0, 1), (0, 2)}


def test_one_gpu_shares_nothing():
    step = one()
    assert share_step(step, 1, Sharding(3)) is step


@pytest.mark.parametrize(
    ("step", "sharding", "said"),
    [
        (lambda: apply_data_parallel(one(), 2), Sharding(3), "runs on 2 GPUs already"),
        (one, Sharding(1, group=2), "`shard_group` is for parameters that ranks share"),
        (one, Sharding(3, group=3), "does not divide 4 GPUs"),
    ],
)
def test_what_cannot_be_shared_is_an_error(step, sharding, said):
    with pytest.raises(TraincastError, match=said):
        share_step(step(), GPUS, sharding)
