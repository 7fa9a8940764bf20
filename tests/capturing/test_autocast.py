"""Autocast on `cuda` follows CUDA's lists, and gradient scaling runs the whole way."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F
from torch import nn

from traincast.capturing import autocast, capture_step
from traincast.utils.errors import TraincastError


def ops_under(dtype, run) -> list[tuple[str, list[str], list[str]]]:
    """(op, dtypes in, dtypes out) of `run()` under autocast."""

    def step():
        with torch.autocast("cuda", dtype=dtype):
            run()

    program = capture_step(lambda _: step, batch_size=1, name="x", rebatch=False).programs[0]
    return [
        (op.name.removeprefix("aten::"), [t.spec.dtype for t in op.inputs], [t.spec.dtype for t in op.outputs])
        for op in program.ops
        if op.name not in ("aten::empty", "aten::ones_like")
    ]


def cuda(*shape, dtype=torch.float32, grad=False):
    return torch.empty(*shape, device="cuda", dtype=dtype, requires_grad=grad)


def test_the_lists_name_every_op_that_cuda_casts():
    # Given the ops for which PyTorch itself registers a CUDA autocast kernel
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    registered = {
        name.removeprefix("aten::")
        for name in names
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
    }

    # Then ours are the same, save those that only cuDNN itself calls, and newer ones
    ours = {
        *autocast.LOWER_PRECISION, *autocast.FLOAT32, *autocast.FLOAT32_RESULT, *autocast.NORMS, *autocast.WIDEST,
        autocast.BANNED,
    }  # fmt: skip
    assert {name for name in ours - registered if hasattr(torch.ops.aten, name)} == set()
    by_name_of_dimension = {name for name in registered if "imname" in name or ".names_" in name}  # until 2.12
    assert registered - ours - by_name_of_dimension <= {
        "cudnn_convolution", "cudnn_convolution_transpose", *autocast.RECURRENT,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_linear_layer_is_cast_down_last_argument_first(dtype):
    low = str(dtype).removeprefix("torch.")
    made = ops_under(dtype, lambda: F.linear(cuda(4, 8), cuda(6, 8), cuda(6)))
    assert made == [
        ("_to_copy", ["float32"], [low]),
        ("_to_copy", ["float32"], [low]),
        ("_to_copy", ["float32"], [low]),
        ("t", [low], [low]),
        ("addmm", [low, low, low], [low]),
    ]


def test_ops_called_from_c_plus_plus_are_cast_too():
    names = ops_under(torch.float16, lambda: torch.bilinear(cuda(4, 8), cuda(4, 8), cuda(2, 8, 8), cuda(2)))
    assert ("_to_copy", ["float32"], ["float16"]) not in names  # promoted to the widest: float32 stays
    names = ops_under(torch.float16, lambda: torch.einsum("ij,jk->ik", cuda(4, 8), cuda(8, 2)))
    assert ("bmm", ["float16", "float16"], ["float16"]) in names


def test_float32_ops_are_cast_up_and_sums_get_a_wide_result():
    assert ops_under(torch.float16, lambda: torch.exp(cuda(4, dtype=torch.float16))) == [
        ("_to_copy", ["float16"], ["float32"]),
        ("exp", ["float32"], ["float32"]),
    ]
    assert ops_under(torch.float16, lambda: cuda(4, dtype=torch.float16).sum()) == [("sum", ["float16"], ["float32"])]
    assert ops_under(torch.float16, lambda: torch.norm(cuda(4, dtype=torch.float16)))[-1][2] == ["float32"]


def test_weights_are_cast_once_per_block():
    weight = {}

    def run():
        w = weight.setdefault("w", nn.Parameter(cuda(8, 8)))
        F.linear(F.linear(cuda(4, 8, dtype=torch.float16), w), w)

    assert [name for name, *_ in ops_under(torch.float16, run)].count("_to_copy") == 1


def test_integers_doubles_and_blocks_switched_off_stay():
    assert ops_under(
        torch.float16, lambda: torch.mm(cuda(2, 2, dtype=torch.float64), cuda(2, 2, dtype=torch.float64))
    ) == [("mm", ["float64", "float64"], ["float64"])]

    def off():
        with torch.autocast("cuda", enabled=False):
            torch.mm(cuda(2, 2), cuda(2, 2))

    assert ops_under(torch.float16, off) == [("mm", ["float32", "float32"], ["float32"])]


def test_what_cuda_forbids_is_forbidden():
    with pytest.raises(TraincastError, match="binary_cross_entropy_with_logits"):
        ops_under(torch.float16, lambda: F.binary_cross_entropy(cuda(4), cuda(4)))


def test_gradient_scaling_runs_through_to_the_optimizer():
    # Given mixed-precision training with a gradient scaler
    def make_step(batch):
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cuda")
        x, y = torch.randn(batch, 4, device="cuda"), torch.zeros(batch, dtype=torch.long, device="cuda")

        def step():
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

        return step

    # When it is captured
    program = capture_step(make_step, batch_size=8, name="x").programs[0]
    names = [op.name for op in program.ops]

    # Then gradients are unscaled and checked, the optimizer steps and the scale is updated
    assert program.rigid == ""
    check = names.index("aten::_amp_foreach_non_finite_check_and_unscale_")
    assert check < names.index("aten::_foreach_addcdiv_") < names.index("aten::_amp_update_scale_")
    synchronises = [
        op for op in program.ops if op.name == "aten::_local_scalar_dense" and op.inputs[0].spec.device == "cuda"
    ]
    assert len(synchronises) == 1  # found_inf
    gradients = [op for op in program.ops if op.name == "aten::mm"]
    assert {t.spec.dtype for op in gradients for t in op.inputs} == {"float16"}
