"""What people write in their training loops, small and often."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import traincast
from traincast.capturing import capture_step
from traincast.ir.workload import Workload


def captured(make_step, batch_size: int = 4) -> Workload:
    return capture_step(make_step, batch_size=batch_size, name="step", rebatch=False)


def ops(workload: Workload) -> Counter[str]:
    return Counter(op.name for op in workload.programs[0].ops)


def of_step(body, batch_size: int = 4) -> Workload:
    """A step that runs `body(model, x)` and updates."""

    def make_step(batch: int):
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(batch, 8, device="cuda")

        def step():
            optimizer.zero_grad()
            body(model, x)
            optimizer.step()

        return step

    return captured(make_step, batch_size)


@pytest.mark.parametrize(
    ("clip", "at_once"),
    [
        (nn.utils.clip_grad_norm_, {"aten::_foreach_norm": 1, "aten::_foreach_mul_": 1}),
        (nn.utils.clip_grad_value_, {"aten::_foreach_clamp_min_": 1, "aten::_foreach_clamp_max_": 1}),
    ],
)
def test_clipping_goes_over_all_gradients_at_once(clip, at_once):
    def body(model, x):
        model(x).sum().backward()
        clip(model.parameters(), 1.0)

    found = ops(of_step(body))
    assert {name: found[name] for name in at_once} == at_once
    assert found["aten::mul_"] == found["aten::clamp_"] == 0


def test_checkpoints_are_loaded_to_the_device(tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"model": nn.Linear(8, 8).state_dict(), "epoch": 3}, path)

    def make_step(batch: int):
        loaded = torch.load(path, map_location=torch.device("cuda"))
        elsewhere = torch.load(path, map_location={"cuda:0": "cuda:0"})
        assert loaded["model"]["weight"].is_cuda and elsewhere["model"]["bias"].is_cuda and loaded["epoch"] == 3
        assert torch.load(path, map_location=lambda storage, place: storage)["model"]["bias"].is_cpu
        model = nn.Linear(8, 8).cuda()
        model.load_state_dict(loaded["model"])
        return lambda: model(torch.randn(batch, 8, device="cuda")).sum().backward()

    assert ops(captured(make_step))["aten::addmm"] == 1


def test_old_types_name_the_device():
    def body(model, x):
        drawn = torch.randn(4, 8).type(torch.cuda.FloatTensor)
        assert drawn.type() == "torch.cuda.FloatTensor" and drawn.cpu().type() == "torch.FloatTensor"
        assert torch.cuda.LongTensor([1, 2]).tolist() == [1, 2] and x.type(torch.float16).dtype == torch.float16
        model(drawn + torch.cuda.FloatTensor(4, 8)).sum().backward()

    assert ops(of_step(body))["aten::addmm"] == 2


def test_a_default_device_keeps_the_numbers_of_optimizers():
    def make_step(batch: int):
        torch.set_default_device("cuda")
        model, x = nn.Linear(8, 8), torch.randn(batch, 8)
        optimizer = torch.optim.Adam(model.parameters())
        assert torch.tensor([2, 3]).tolist() == [2, 3] and torch.tensor(1.0).is_cuda

        def step():
            model(x).sum().backward()
            optimizer.step()
            assert optimizer.state[model.bias]["step"].item() > 0

        return step

    assert ops(captured(make_step))["aten::_foreach_addcdiv_"] == 1


def test_numbers_of_inference_mode_can_be_read_outside():
    def body(model, x):
        with torch.inference_mode():
            score = model(x).mean()
        assert score.item() == 0.0 and float(score) == 0.0
        model(x).sum().backward()

    assert ops(of_step(body))["aten::_local_scalar_dense"] == 2


def test_gradients_may_be_checked_for_nan():
    def body(model, x):
        with torch.autograd.set_detect_anomaly(True):
            model(x).sum().backward()

    assert ops(of_step(body))["aten::_local_scalar_dense"] > 0


def test_a_weight_of_all_classes_at_once():
    def body(model, x):
        weight = torch.ones(1, device="cuda")
        functional.binary_cross_entropy_with_logits(model(x), torch.zeros_like(x), pos_weight=weight).backward()

    workload = of_step(body)
    written = [op for op in workload.programs[0].ops if op.name == "aten::mul_"]
    assert written and all(op.outputs[0].spec.shape == (4, 8) for op in written)


def test_data_parallel_on_one_gpu():
    def body(model, x):
        nn.DataParallel(model)(x.cpu()).sum().backward()

    assert ops(of_step(body)) - ops(of_step(lambda model, x: model(x.cpu().cuda()).sum().backward())) == Counter()


def test_arrays_of_fractions_are_zeros_and_said():
    def body(model, x):
        made = model(x)
        assert made.detach().cpu().numpy().max() == 0 and made.sum(1).tolist() == [0.0] * 4
        made.sum().backward()

    assert any("taken to be 0" in text for text in of_step(body).assumptions)


def test_whole_numbers_before_the_step_are_zeros_too():
    with traincast.recording(batch_size=4) as found:
        model = nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        best = model(torch.randn(4, 8, device="cuda")).argmax(1).cpu().numpy()
        while True:
            optimizer.zero_grad()
            model(torch.randn(4, 8, device="cuda")).sum().backward()
            optimizer.step()
    assert best.tolist() == [0, 0, 0, 0]
    assert any("taken to be 0" in text for text in found.workload.assumptions)


def test_counts_have_the_length_that_is_asked_for():
    def body(model, x):
        made = model(x)
        assert torch.bincount(made.argmax(1), minlength=8).shape == (8,)
        made.sum().backward()

    assert "numbers that are counted are below minlength, 8" in of_step(body).assumptions[0]


def test_an_epoch_may_begin_inside_the_step():
    def make_step(batch: int):
        model = nn.Linear(8, 8).cuda()
        loader = DataLoader(TensorDataset(torch.randn(2 * batch, 8)), batch_size=batch, shuffle=True)

        def step():
            for (x,) in loader:
                model(x.cuda()).sum().backward()

        return step

    found = ops(captured(make_step))
    assert found["aten::addmm"] == 2 and not any("random" in name or "empty" in name for name in found)


def test_recurrent_layers_lie_time_step_by_time_step_in_memory():
    def make_step(batch: int):
        layer, top = nn.GRU(8, 8, batch_first=True).cuda(), nn.Linear(8, 2).cuda()
        x = torch.randn(batch, 5, 8, device="cuda")
        return lambda: top(layer(x)[0]).sum().backward()

    workload = captured(make_step)
    made = next(op for op in workload.programs[0].ops if op.name == "aten::_cudnn_rnn").outputs[0].spec
    assert (made.shape, made.stride) == ((4, 5, 8), (8, 32, 1))
    assert ops(workload)["aten::addmm"] == 0  # a linear layer on it is a product and a sum


def test_a_product_with_a_sparse_matrix_is_dense():
    def make_step(batch: int):
        places = torch.stack([torch.arange(batch), torch.arange(batch)])
        graph = torch.sparse_coo_tensor(places, torch.ones(batch), (batch, batch)).coalesce().cuda()
        table = nn.Parameter(torch.randn(batch, 8, device="cuda"))
        return lambda: torch.sparse.mm(graph, table).sum().backward()

    workload = captured(make_step)
    made = next(op for op in workload.programs[0].ops if op.name == "aten::_sparse_addmm")
    assert made.outputs[0].spec.shape == (4, 8)
    assert traincast.predict(workload, on="a100-80gb").iteration > 0


def test_optimizers_that_step_in_backward():
    with traincast.recording(batch_size=4) as found:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda()
        of = {p: torch.optim.Adam([p], foreach=False) for p in model.parameters()}

        def update(parameter):
            of[parameter].step()
            of[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        while True:
            model(torch.randn(4, 8, device="cuda")).sum().backward()
    counts = ops(found.workload)
    assert (counts["aten::addmm"], counts["aten::addcdiv_"]) == (2, 4)
