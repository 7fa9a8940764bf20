"""What scripts of other people do around a step: devices by number, data swapped, values asked for, precision set."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from traincast.capturing import capture_function, capture_step
from traincast.capturing.rebatch import notify_listener
from traincast.ir import Program
from traincast.utils.errors import TraincastError


def captured(make_step) -> Program:
    return capture_step(make_step, batch_size=8, name="x", rebatch=False).programs[0]


def places(program, name):
    return [
        ([t.spec.device for t in op.inputs], [t.spec.device for t in op.outputs])
        for op in program.ops
        if op.name == name
    ]


@pytest.mark.parametrize("place", [lambda m: m.to(0), lambda m: m.to(torch.device(0)), lambda m: m.to(device=0)])
def test_a_number_is_a_gpu(place):
    def make_step(batch):
        model = place(nn.Linear(4, 4))
        assert isinstance(torch.device(0), torch.device) and str(torch.device(1)) == "cuda:1"
        x = torch.zeros(batch, 4).to(0)
        return lambda: model(x)

    before = torch.device
    assert places(captured(make_step), "aten::addmm") == [(["cuda"] * 3, ["cuda"])]
    assert torch.device is before  # outside a capture it is PyTorch's own again


def test_data_of_a_parameter_can_be_swapped():
    def make_step(batch):
        table = nn.Embedding(10, 4, device="cuda")
        table.weight.data = torch.randn(20, 4)
        table.cuda()
        x = torch.zeros(batch, dtype=torch.int64, device="cuda")
        return lambda: table(x)

    (lookup,) = [op for op in captured(make_step).ops if op.name == "aten::embedding"]
    assert lookup.inputs[0].spec.shape == (20, 4) and lookup.inputs[0].spec.device == "cuda"


@pytest.mark.parametrize("bounds", [(-2.0, 2.0), (3.0, 4.0)])
def test_truncated_normal_weights(bounds):
    def make_step(batch):
        model = nn.Linear(4, 4).cuda()
        nn.init.trunc_normal_(model.weight, std=1.0, a=bounds[0], b=bounds[1])
        x = torch.zeros(batch, 4, device="cuda")
        return lambda: model(x)

    assert places(captured(make_step), "aten::addmm")


def test_layers_on_the_cpu_have_their_backward_there():
    def make_step(batch):
        table, top = nn.Embedding(10, 4), nn.Linear(4, 1).cuda()
        x = torch.zeros(batch, dtype=torch.int64)
        return lambda: top(table(x).cuda()).sum().backward()

    program = captured(make_step)
    assert places(program, "aten::_to_copy") == [(["cpu"], ["cuda"]), (["cuda"], ["cpu"])]
    assert places(program, "aten::embedding_dense_backward") == [(["cpu", "cpu"], ["cpu"])]


def whole_number(use):
    def make_step(batch):
        x = torch.randn(batch, device="cuda").long()
        return lambda: use(x.sum().item())

    return make_step


def test_a_number_of_the_device_can_be_counted_and_printed():
    counted = []

    def use(number):
        counted.append(f"{1 + 2 * number} of {number}, {number / 3:.1f}")

    captured(whole_number(use))
    assert counted[-1] == "0 of 0, 0.0"


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda n: torch.zeros(n, device="cuda"), "as a size or an argument"),
        (lambda n: torch.zeros(2 * n + 1, 3, device="cuda"), "as a size or an argument"),
        (lambda n: n > 3, "a decision"),
        (lambda n: bool(n), "a decision"),
    ],
)
def test_a_number_of_the_device_decides_nothing(use, said):
    with pytest.raises(TraincastError, match=f"test_scripts.py.*{said}.* needs the values of a tensor"):
        captured(whole_number(use))


def test_a_truth_value_of_the_device_is_refused():
    def make_step(batch):
        x = torch.randn(batch, device="cuda")
        return lambda: (x > 0).any().item()

    with pytest.raises(TraincastError, match="a decision on a tensor needs the values"):
        captured(make_step)


@pytest.mark.parametrize("read", [torch.Tensor.tolist, lambda t: torch.zeros(int(t[0])), lambda t: t.nonzero()])
def test_what_the_device_wrote_into_host_memory_is_not_known(read):
    def make_step(batch):
        host, x = torch.zeros(batch, dtype=torch.int64), torch.randn(batch, device="cuda").long()

        def step():
            host.copy_(x)
            read(host + 1)

        return step

    with pytest.raises(TraincastError, match="needs the values of a tensor"):
        captured(make_step)


def test_precision_settings_are_followed_and_put_back(tmp_path):
    script = tmp_path / "train.py"
    (tmp_path / "beside.py").write_text("SIZE = 4\n")
    script.write_text(
        "import torch\n"
        "torch.set_float32_matmul_precision('high')\n"
        "torch.backends.cudnn.allow_tf32 = False\n"
        "def make_step(batch):\n"
        "    from beside import SIZE\n"
        "    x = torch.zeros(batch, SIZE, device='cuda')\n"
        "    return lambda: x @ x.t()\n"
    )
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    workload = capture_function(f"{script}:make_step", batch_size=2)

    assert workload.tf32 == ("products",)
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before
    assert capture_function(lambda batch: lambda: torch.zeros(batch, device="cuda") + 1, batch_size=2).tf32 == (
        "convolutions",
    )


def test_the_line_named_is_never_one_of_the_standard_library():
    from contextlib import contextmanager

    @contextmanager
    def region():
        yield

    def make_step(batch):
        x = torch.randn(batch, device="cuda")

        @region()
        def step():
            return x.nonzero()

        return step

    with pytest.raises(TraincastError, match=r"^\S*test_scripts.py:\d+: aten::nonzero needs"):
        captured(make_step)


@pytest.mark.parametrize(("function", "name"), [("make_step", "my_net"), ("train_big", "train_big")])
def test_a_workload_is_named_after_its_function(tmp_path, function, name):
    file = tmp_path / "my_net.py"
    file.write_text(
        f"import torch\ndef {function}(batch):\n    x = torch.zeros(batch, device='cuda')\n    return lambda: x + 1\n"
    )

    heard = []
    with notify_listener(heard.append):
        assert capture_function(f"{file}:{function}", batch_size=2).name == name
    assert heard[0] == "batch 2" and len(heard) > 1
