"""What cannot be captured is rejected on one line that names the place and the remedy."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from traincast.capturing import capture_function, capture_step, load_function
from traincast.utils.errors import TraincastError

SCRIPT = """import torch

def make_step(batch):
    x = torch.randn(batch, 4, device="cuda")
    def step():
        {body}
    return step
"""


def refusal(tmp_path, body) -> str:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT.format(body=body))
    with pytest.raises(TraincastError) as error:
        capture_function(f"{file}:make_step", batch_size=8)
    message = str(error.value)
    assert "\n" not in message
    return message.replace(str(tmp_path), "")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("if x.sum() > 0: x.exp()", ["a decision on a tensor", "torch.where"]),
        ("while not (x > 0).any(): pass", ["a decision on a tensor"]),
        ("torch.nonzero(x)", ["aten::nonzero", "torch.where"]),
        ("x[x > 0]", ["aten::index", "masked_fill"]),
        ("torch.masked_select(x, x > 0)", ["aten::masked_select"]),
        ("torch.unique(x)", ["distinct"]),
        ("torch.repeat_interleave(x.long()[:, 0])", ["output_size"]),
        ("x.long().tolist()", ["tensor.tolist()"]),
        ("x.long().cpu().numpy()", ["tensor.numpy()"]),
        ("x[:, : int(x.max())]", ["int(tensor)"]),
        ("torch.zeros(4)[x.long()[0, 0]:]", ["a tensor as an index or size"]),
        ("torch.zeros(x.long().max(), device='cuda')", ["a tensor as an index or size"]),
        ("x @ x", ["RuntimeError"]),
        ("torch.cuda.CUDAGraph()", ["CUDA graphs"]),
        ("raise KeyError('lost')", ["KeyError", "lost"]),
    ],
)
def test_the_users_line_and_the_remedy_are_named(tmp_path, body, words):
    message = refusal(tmp_path, body)
    assert message.startswith("/train.py:6: ")
    for word in words:
        assert word in message


def test_writing_through_a_mask_is_fine(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT.format(body="x[x > 0] = 0.0"))
    workload = capture_function(f"{file}:make_step", batch_size=8)
    assert workload.name == "train"
    assert any("index_put" in op.name or "masked_fill" in op.name for op in workload.programs[0].ops)


def test_numbers_that_are_only_shown_are_zero(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT.format(body="print(f'{x.sum():.1f} {x.long().sum()} {x.sum().item()} {float(x.sum())}')"))
    capture_function(f"{file}:make_step", batch_size=8)


def test_a_step_that_does_nothing(tmp_path):
    assert "ran no PyTorch op" in refusal(tmp_path, "pass")


@pytest.mark.parametrize(
    ("make_step", "message"),
    [
        (lambda batch: None, "must return a callable"),
        (lambda: None, r"must take \(batch_size\)"),
        (lambda a, b, c: None, r"must take \(batch_size\)"),
        (lambda batch, length: None, "takes a sequence length"),
    ],
)
def test_a_function_that_breaks_the_contract(make_step, message):
    with pytest.raises(TraincastError, match=message):
        capture_step(make_step, batch_size=2, name="x")


def test_a_length_for_a_function_without_one():
    with pytest.raises(TraincastError, match="takes no sequence length"):
        capture_step(lambda batch: lambda: None, batch_size=2, seq_len=8, name="x")


@pytest.mark.parametrize("sizes", [{"batch_size": 0}, {"batch_size": 2, "seq_len": -1}])
def test_sizes_out_of_range(sizes):
    with pytest.raises(TraincastError, match="out of range"):
        capture_step(lambda batch, length=1: lambda: None, name="x", **sizes)


def test_an_unknown_mode():
    with pytest.raises(TraincastError, match="training or inference"):
        capture_step(lambda batch: lambda: None, batch_size=2, name="x", mode="dreaming")


def test_an_op_without_a_meta_implementation():
    @torch.library.custom_op("traincasttest::opaque", mutates_args=())
    def opaque(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    with pytest.raises(TraincastError, match=r"traincasttest.opaque.*register_fake"):
        capture_step(lambda b: lambda: opaque(torch.ones(b, device="cuda")), batch_size=2, name="x")


@pytest.mark.parametrize(
    ("text", "spec", "message"),
    [
        ("def make_step(b): return b", "train.py", "names no function; give FILE.py:FUNCTION"),
        ("def make_step(b): return b", "missing.py:make_step", "no file"),
        ("def make_step(b): return b", "train.py:make_stop", "unknown function 'make_stop'. Did you mean make_step"),
        ("make_step = 3", "train.py:make_step", "is no function but int"),
        (
            "import torch\nraise ValueError('no data')",
            "train.py:make_step",
            "train.py:2: the file fails to load: ValueError",
        ),
        ("def make_step(:", "train.py:make_step", "train.py:1: the file fails to load: SyntaxError"),
        ("import nothing_of_this_name", "train.py:make_step", "ModuleNotFoundError"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path, monkeypatch, text, spec, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(text)
    with pytest.raises(TraincastError) as error:
        load_function(spec)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_may_import_its_neighbours(tmp_path):
    (tmp_path / "neighbour.py").write_text("SIZE = 4\n")
    file = tmp_path / "train.py"
    file.write_text(
        "import torch\nfrom neighbour import SIZE\n"
        "def make_step(batch, length):\n    x = torch.ones(batch, length, SIZE, device='cuda')\n"
        "    return lambda: x + 1\n"
    )
    workload = capture_function(f"{file}:make_step", batch_size=2, seq_len=16, name="mine")
    assert workload.name == "mine"
    assert workload.resized(batch_size=5, seq_len=32).programs[0].ops[0].inputs[0].spec.shape == (5, 32, 4)


def test_what_a_library_adds_to_a_rejection_is_left_out():
    def make_step(batch):
        x = torch.rand(batch, device="cuda")

        def step():
            try:
                return x.nonzero()
            except Exception as error:
                raise type(error)(f"{error}\n  In call to configurable 'train_fn'") from error

        return step

    with pytest.raises(TraincastError) as caught:
        capture_step(make_step, batch_size=4, name="x", rebatch=False)
    assert "aten::nonzero needs the values" in str(caught.value) and "\n" not in str(caught.value)
