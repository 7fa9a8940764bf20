"""Loops whose step is not between two calls of an optimizer of PyTorch's, and scripts that are captured again."""

import json
import textwrap
from pathlib import Path

import pytest

import traincast
from traincast.app.captures import recapture
from traincast.app.cli.main import main
from traincast.capturing.from_file import capture_function
from traincast.ir.workload import CAPTURED_BY
from traincast.utils.errors import TraincastError

_HEAD = """
import sys
import torch
from torch import nn
model = nn.Linear(8, 8).cuda()
"""
_OWN_UPDATE = """
for i in range(100_000):
    model.zero_grad()
    model(torch.rand(4, 8, device="cuda")).sum().backward()
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.1)
"""
_FEW = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range({}):
    optimizer.zero_grad()
    model(torch.rand(4, 8, device="cuda")).sum().backward()
    optimizer.step()
"""


def _write(folder: Path, text: str) -> str:
    (folder / "train.py").write_text(_HEAD + textwrap.dedent(text))
    return str(folder / "train.py")


def test_a_loop_that_updates_its_parameters_itself_goes_from_one_backward_pass_to_the_next(tmp_path: Path):
    workload = capture_function(_write(tmp_path, _OWN_UPDATE))
    names = [signature.name for signature in workload.programs[0].signatures]
    assert names.count("aten::add_") == 2 and names.count("aten::addmm") == 1 and workload.samples == 4
    assert any("from one backward pass to the next" in text for text in workload.assumptions)


@pytest.mark.parametrize(("updates", "which"), [(1, "first"), (2, "second")])
def test_a_loop_of_few_updates_is_its_last_one(updates: int, which: str, tmp_path: Path):
    workload = capture_function(_write(tmp_path, _FEW.format(updates)))
    names = [signature.name for signature in workload.programs[0].signatures]
    assert names.count("aten::addmm") == 1 and "aten::_foreach_add_" in names
    assert any(f"its {which} is the step" in text for text in workload.assumptions)


def test_a_loop_that_an_unknown_number_ends_says_which(tmp_path: Path):
    text = """
    for i in range(100):
        loss = model(torch.rand(4, 8, device="cuda")).square().mean()
        loss.backward()
        if loss.item() < 1e-3:
            break
    """
    with pytest.raises(TraincastError, match=r"ended early\? train.py:\d+: a fraction .*branch=true"):
        capture_function(_write(tmp_path, text))


def test_samples_are_those_of_the_model_and_not_of_what_prepares_data_or_of_what_models_make(tmp_path: Path):
    text = """
    discriminator = nn.Linear(8, 1).cuda()
    scale = nn.Hardtanh()  # a transform of each sample, as torchvision's are modules
    of_d, of_g = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (discriminator, model))
    for i in range(20):
        real = torch.stack([scale(torch.rand(8)) for _ in range(6)]).cuda()
        fake = model(torch.rand(6, 8, device="cuda"))
        discriminator(real).sum().backward()
        discriminator(fake.detach()).sum().backward()
        between = (real + fake.detach()).requires_grad_()  # the gradient penalty of a WGAN
        slope, = torch.autograd.grad(discriminator(between).sum(), between, create_graph=True)
        slope.square().sum().backward()
        of_d.step()
        discriminator(fake).sum().backward()
        of_g.step()
    """
    workload = capture_function(_write(tmp_path, text), batch_size=6)
    assert workload.samples == 6 and not any("batches of" in text for text in workload.assumptions)


_DEEPER_WITH_BATCH = """
batch = int(sys.argv[1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(8):
    hidden = torch.rand(batch, 8, device="cuda")
    for _ in range(batch.bit_length()):
        hidden = model(hidden)
    optimizer.zero_grad()
    hidden.sum().backward()
    optimizer.step()
"""


def test_a_script_of_one_size_is_captured_again_at_the_size_asked_for(tmp_path: Path, capsys):
    script, out = _write(tmp_path, _DEEPER_WITH_BATCH), str(tmp_path / "train.tc")
    workload = traincast.capture(script, batch_size=4, arguments=["{batch_size}"], out=out)
    assert workload.programs[0].rigid and json.loads(workload.meta[CAPTURED_BY])["function"] == script
    assert main(["predict", out, "--on", "a100-80gb", "--batch-size", "16"]) == 2
    assert "--recapture runs its code again" in capsys.readouterr().err
    assert main(["predict", out, "--on", "a100-80gb", "--batch-size", "16", "--recapture", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["batch_size"] == 16
    again = recapture(workload, 16, None, None)
    assert again.batch_size == 16 and again.programs[0].num_ops > workload.programs[0].num_ops
    assert recapture(again, 16, None, None) is again


def test_an_evaluation_that_comes_earlier_at_other_sizes_may_read_what_it_will(tmp_path: Path):
    text = """
    batch = int(sys.argv[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(20):
        model.train()
        for start in range(0, 33 - batch, batch):  # eight updates at 4, four at 7, two at 11
            optimizer.zero_grad()
            model(torch.rand(batch, 8, device="cuda")).sum().backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            found = model(torch.rand(3, 8, device="cuda")).argmax(1).tolist()
            print(["abcdefgh"[place] for place in found])
    """
    workload = capture_function(_write(tmp_path, text), batch_size=4, arguments=["{batch_size}"])
    assert not workload.programs[0].rigid
    assert not any("not all compared" in text or "the loop ends after" in text for text in workload.assumptions)


def test_a_script_that_does_not_say_its_batch_size_is_not_captured_again(tmp_path: Path):
    hidden = _FEW.format(8).replace("rand(4,", "rand(2 * 2,")
    workload = traincast.capture(_write(tmp_path, hidden), batch_size=4)
    with pytest.raises(TraincastError, match=r"do not say where its batch size is; .*\{batch_size\}"):
        recapture(workload, 16, None, None)


def test_a_triton_launch_is_an_op_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    runtime = tmp_path / "triton" / "runtime"
    runtime.mkdir(parents=True)
    for folder in (runtime, runtime.parent):
        (folder / "__init__.py").touch()
    (runtime / "jit.py").write_text(
        textwrap.dedent("""
        class JITFunction:
            def __init__(self, fn):
                self.fn = fn
            def __getitem__(self, grid):
                return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)
            def run(self, *args, grid, warmup, **kwargs):
                raise AssertionError("libcuda.so cannot be found")
        """)
    )
    text = """
    from triton.runtime.jit import JITFunction
    @JITFunction
    def double(x, y, n): ...
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(8):
        hidden = model(torch.rand(4, 8, device="cuda"))
        made = torch.empty_like(hidden)
        double[(1,)](hidden, made, 32)
        hidden.sum().backward()
        optimizer.step()
    """
    workload = traincast.capture(_write(tmp_path, text))
    found = next(s for s in workload.programs[0].signatures if s.name == "triton_kernel::double")
    assert [spec.shape for spec in found.inputs] == [(4, 8), (4, 8)]
    assert any("triton_kernel::double" in text for text in workload.assumptions)
    assert traincast.predict(workload, on="a100-80gb").iteration > 0


def test_devices_that_libraries_ask_parameters_for_are_those_of_the_script():
    import torch

    def make_step(batch_size: int):
        seen = torch._C._nn._parse_to(device="cuda")[0].type
        model = torch.nn.Linear(8, 8).cuda()
        assert seen == "cuda"  # as bitsandbytes' 4-bit weights ask
        return lambda: model(torch.rand(batch_size, 8, device="cuda")).sum().backward()

    assert capture_function(make_step, batch_size=4).programs[0].num_ops


def test_an_optimizer_that_wraps_others_without_pytorchs_constructor_is_one(tmp_path: Path):
    text = """
    class Combined(torch.optim.Optimizer):  # as TorchRec's are
        def __init__(self, inner):
            self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
            self.inner, self.state, self.param_groups, self.defaults = inner, {}, [], {}
            self._patch_step_function()
        def step(self, closure=None):
            self.inner.step()
    optimizer = Combined(torch.optim.SGD(model.parameters(), lr=0.1))
    for i in range(8):
        model.zero_grad()
        model(torch.rand(4, 8, device="cuda")).sum().backward()
        optimizer.step()
    """
    names = [signature.name for signature in capture_function(_write(tmp_path, text)).programs[0].signatures]
    assert names.count("aten::_foreach_add_") == 1 and "aten::addmm" in names


def test_a_fraction_read_from_a_tensor_times_a_tensor_is_an_op():
    import torch

    def make_step(batch_size: int):
        model = torch.nn.Linear(8, 8).cuda()

        def step():
            hidden = model(torch.rand(batch_size, 8, device="cuda"))
            alpha = hidden.mean().item()  # as soft actor-critic reads its temperature
            (alpha * hidden).mean().backward()

        return step

    names = [signature.name for signature in capture_function(make_step, batch_size=4).programs[0].signatures]
    assert "aten::mul" in names
