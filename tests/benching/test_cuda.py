"""The CUDA device, driven by a scripted `torch.cuda` through every branch."""

from __future__ import annotations

import json

import pytest
import torch

from tests.benching.fake_cuda import FakeCuda
from traincast.api import measure
from traincast.benching import timing
from traincast.benching.calls import OpCall
from traincast.benching.copies import CopyCall, CopyTask, ways
from traincast.benching.cuda import CudaDevice
from traincast.benching.device import run_timed
from traincast.benching.opening import open_device
from traincast.benching.parts import possible_ranks
from traincast.benching.plans import plan
from traincast.benching.timing import Reference, run_series
from traincast.errors import TraincastError


def test_without_a_gpu_the_remedy_is_the_cpu():
    with pytest.raises(TraincastError, match=r"no CUDA or ROCm device.*`device='cpu'`"):
        open_device("cuda")


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    FakeCuda(devices=2).install(monkeypatch)
    with pytest.raises(TraincastError, match="no GPU 2; this machine has 2"):
        CudaDevice(2)


def test_identity_names_the_gpu_and_its_libraries(monkeypatch):
    FakeCuda().install(monkeypatch)
    identity = CudaDevice().identity()
    assert (identity.device, identity.name, identity.memory_bytes) == ("cuda", "NVIDIA Fake 9000", 80 << 30)
    assert identity.libraries == "cuda 12.8 cudnn 90100"


def test_identity_of_a_rocm_device_says_hip(monkeypatch):
    FakeCuda().install(monkeypatch)
    monkeypatch.setattr(torch.version, "hip", "6.2", raising=False)
    assert CudaDevice().identity().libraries.startswith("hip 6.2")


def test_a_locked_clock_is_part_of_the_identity_and_checked(monkeypatch):
    monkeypatch.setitem(timing._REFERENCE_SIDE, "cuda", 4)
    FakeCuda(clock=1410).install(monkeypatch)
    for locked in (0.0, 1400.0):
        device = open_device("cuda", locked_mhz=locked)
        assert device.identity().locked_clock_mhz == locked
        timing.check_locked(device, Reference(device))
    slower = CudaDevice(locked_mhz=1297.0)
    with pytest.raises(TraincastError, match=r"runs at 1410 MHz, not at 1297; lock it \(nvidia-smi -lgc 1297\)"):
        timing.check_locked(slower, Reference(slower))
    with pytest.raises(TraincastError, match="a CPU's clock cannot be locked from here"):
        open_device("cpu", locked_mhz=1297.0)


def test_indices_go_where_the_op_runs(monkeypatch):
    cuda = FakeCuda().install(monkeypatch)
    OpCall(next(plan(0, ("_embedding_bag",))).signature, CudaDevice())
    assert cuda.calls.count("to cuda:0") == 2, "indices and offsets"
    cuda.calls.clear()
    OpCall(next(plan(0, ("sparse_update",))).signature, CudaDevice())
    assert cuda.calls.count("to cuda:0") == 1


@pytest.mark.parametrize(("memory", "pinned"), [("pinned", 1), ("pageable", 0)])
@pytest.mark.parametrize("direction", ["to device", "to host"])
def test_copies_go_both_ways_from_both_kinds_of_memory(monkeypatch, direction, memory, pinned):
    cuda = FakeCuda().install(monkeypatch)
    call = CopyCall(CopyTask(direction, memory, 64), CudaDevice(), sets=1)
    call(0)
    assert cuda.calls.count("pin_memory") == pinned
    assert len(ways("cuda")) == 4


def test_a_measured_step_comes_with_a_trace(monkeypatch, tmp_path):
    monkeypatch.setenv("TRAINCAST_HOME", str(tmp_path))
    monkeypatch.setitem(timing._REFERENCE_SIDE, "cuda", 4)
    FakeCuda(milliseconds=[1.0] * 500).install(monkeypatch)

    def make_step(batch_size):
        return lambda: torch.ones(batch_size).sum()

    measured = measure(make_step, device="cuda", repeats=3)
    assert measured.trace == str(tmp_path / "step-make_step.json")
    assert json.loads((tmp_path / "step-make_step.json").read_text())["traceEvents"][0]["cat"] == "kernel"
    assert f"trace: {measured.trace}" in measured.headline()


def test_ranks_are_as_many_as_gpus(monkeypatch):
    FakeCuda(devices=4).install(monkeypatch)
    assert possible_ranks(CudaDevice()) == 4


def test_work_is_timed_between_two_events_after_waiting(monkeypatch):
    cuda = FakeCuda(milliseconds=[2.5, 0.0]).install(monkeypatch)
    device = CudaDevice()
    taken = run_timed(device, lambda: cuda.calls.append("work"))
    assert cuda.calls == ["set_device 0", "synchronize", "record", "work", "record", "synchronize"]
    assert (taken.wall, taken.busy) == (2.5e-3, 2.5e-3)


def test_tensors_are_made_on_the_gpu_in_the_type_asked_for(monkeypatch):
    cuda = FakeCuda(devices=4).install(monkeypatch)
    device = CudaDevice(3)
    assert device.allocate((2, 3), "bfloat16").dtype is torch.bfloat16
    assert device.allocate((5,), "int64").dtype is torch.int64
    assert cuda.calls == ["set_device 3", "randn on cuda:3", "randint on cuda:3"]


def test_a_full_gpu_is_one_line(monkeypatch):
    cuda = FakeCuda().install(monkeypatch)
    device = CudaDevice()
    cuda.out_of_memory = True
    with pytest.raises(TraincastError, match=r"a tensor of 8 x 4 float32 does not fit.*GPU 0; end other programs"):
        device.allocate((8, 4))


def test_the_flush_buffer_is_made_once(monkeypatch):
    monkeypatch.setattr("traincast.benching.cuda._FLUSHED_BYTES", 64)
    cuda = FakeCuda().install(monkeypatch)
    device = CudaDevice()
    device.flush()
    device.flush()
    assert cuda.calls.count("zeros on cuda:0") == 1


@pytest.mark.parametrize(("clock", "shown"), [(1410, 1410.0), (None, 0.0)])
def test_the_clock_is_zero_where_nobody_can_be_asked(monkeypatch, clock, shown):
    FakeCuda(clock=clock).install(monkeypatch)
    assert CudaDevice().clock_mhz() == shown


def test_a_series_on_the_gpu_holds_what_the_events_say(monkeypatch):
    monkeypatch.setitem(__import__("traincast.benching.timing").benching.timing._REFERENCE_SIDE, "cuda", 4)
    # reference 1 ms, work 6 ms, reference 4 ms: each pair of events, and no time between pairs
    FakeCuda(milliseconds=[1, 0, 6, 0, 4, 0, 6, 0, 4, 0, 6, 0, 4, 0]).install(monkeypatch)
    device = CudaDevice()
    series = run_series(device, Reference(device), lambda: None, repeats=3)
    assert series.wall.tolist() == pytest.approx([6e-3] * 3)
    assert series.reference_wall.tolist() == pytest.approx([2e-3, 4e-3, 4e-3])
