"""Real steps, run on this machine's processor."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from traincast.app.api import measure
from traincast.app.cli.main import main
from traincast.calibration.bench.devices import CpuDevice
from traincast.calibration.bench.store import open_device
from traincast.models.dlrm.config import DlrmConfig
from traincast.models.embeddings.access import Uniform, Zipf, draw_rows
from traincast.utils.errors import TraincastError
from traincast_evaluation.zoo.build.steps import draw_host_batch

TINY = DlrmConfig(
    name="tiny", bottom_mlp=(8, 16, 8), top_mlp=(16, 1), rows_per_table=(50, 1000), embedding_dim=8,
    lookups_per_table=(3, 2), access=("uniform", "zipf:1.1"), batch_size=16,
)  # fmt: skip


def steps_of(batch_size):
    weight = torch.randn(64, 64, requires_grad=True)
    return lambda: (torch.randn(batch_size, 64) @ weight).sum().backward()


def test_a_dlrm_is_run_and_every_repetition_is_kept():
    result = measure(TINY, repeats=4)
    assert (result.workload, result.batch_size, result.summary.repeats) == ("tiny", 16, 4)
    assert len(result.records()["repetitions"]) == 4
    assert result.summary.low <= result.summary.corrected <= result.summary.high
    assert result.identity.threads == 1
    assert result.to_dict()["corrected_ms"] == pytest.approx(1e3 * result.summary.corrected)


def test_a_function_is_run_at_the_batch_size_asked_for():
    result = measure(steps_of, batch_size=5, repeats=3, clock="busy")
    assert (result.workload, result.batch_size, result.clock) == ("steps_of", 5, "busy")


def test_the_command_line_measures_a_file(tmp_path, capsys):
    file = tmp_path / "own.py"
    file.write_text(
        "import torch\ndef make(batch_size):\n    print('noise')\n    return lambda: torch.ones(batch_size)\n"
    )
    assert main(["measure", f"{file}:make", "--repeats", "3", "--json", "--trace-out", str(tmp_path / "t.json")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["workload"], document["repeats"], document["batch_size"]) == ("own", 3, 32)
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def fails_later(batch_size):
    left = iter([None] * 4)
    return lambda: next(left)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda batch_size: None, "gave a NoneType, no step: let it return a function to call"),
        (lambda batch_size: 1 / 0, "does not run here: ZeroDivisionError: division by zero"),
        (fails_later, "fails_later does not run here: StopIteration"),
    ],
)
def test_a_function_that_makes_no_step_is_one_line(make, said):
    with pytest.raises(TraincastError, match=said):
        measure(make, repeats=5)


def test_a_step_that_asks_for_a_gpu_is_told_so():
    def make(batch_size):
        return lambda: torch.ones(batch_size, device="cuda")

    with pytest.raises(TraincastError, match=r"make does not run here:.*torch.cuda.is_available"):
        measure(make, repeats=3)


@pytest.mark.parametrize(
    ("step", "options", "said"),
    [
        ("no-such-model", {}, "unknown model 'no-such-model'"),
        ("dlrm-v2", {}, "dlrm-v2 does not run here with 'fbgemm'"),
        ("saved.tc", {}, "holds a captured step, which cannot be run"),
        (TINY, {"embedding": "batched"}, "give `embedding='bag'`"),
        (TINY, {"dtype": "fp16"}, "fp32 or bf16, not fp16"),
        (TINY, {"optimizer": "none"}, "without its optimizer"),
        (TINY, {"repeats": 1}, "`repeats` is 1; give 3 to 10000"),
        (TINY, {"clock": "sun"}, "unknown clock 'sun'"),
        (TINY, {"device": "tpu"}, "unknown device 'tpu'"),
    ],
)
def test_what_cannot_be_run_is_one_line(step, options, said):
    with pytest.raises(TraincastError, match=said):
        measure(step, **options)


def test_tables_larger_than_memory_are_refused(monkeypatch):
    monkeypatch.setattr("traincast.calibration.bench.devices.read_free_memory_bytes", lambda: 10_000)
    with pytest.raises(TraincastError, match=r"the tables of tiny take 0.0 GB and 0.0 GB are free on the cpu"):
        measure(TINY)


def test_drawn_rows_are_in_the_table_and_as_skewed_as_asked_for():
    random = np.random.default_rng(0)
    uniform, skewed = (draw_rows(access, 1000, 20_000, random) for access in (Uniform(), Zipf(1.2)))
    assert min(uniform.min(), skewed.min()) >= 0 and max(uniform.max(), skewed.max()) < 1000
    assert np.bincount(uniform).max() < 50 < 3000 < np.bincount(skewed).max()
    assert draw_rows(Uniform(), 1, 5, random).tolist() == [0] * 5


def test_a_drawn_batch_has_a_bag_of_every_table_and_sample():
    batch = draw_host_batch(TINY.replace_options(embedding="bag", optimizer="sgd"), 4, torch.float32)
    assert [tensor.numel() for tensor in batch.indices] == [12, 8]
    assert batch.offsets.tolist() == [[0, 3, 6, 9], [0, 2, 4, 6]]


def test_the_cpu_says_what_it_is_and_keeps_two_clocks():
    device = open_device("cpu")
    assert isinstance(device, CpuDevice)
    identity = device.identity()
    assert identity.torch == torch.__version__ and identity.memory_bytes > 1 << 30
    taken = device.elapsed((10, 5), (1_000_000_010, 500_000_005))
    assert (taken.of("wall"), taken.of("busy")) == (1.0, 0.5)
    assert device.allocate((3,), "int64").dtype is torch.int64
    device.flush()
    assert device.clock_mhz() >= 0.0
