"""The CUDA device, driven by a scripted `torch.cuda` through every branch."""

from __future__ import annotations

import json
import warnings
from math import inf

import pytest
import torch
import torch.distributed as dist

from tests.calibration.bench.fake_cuda import STICKY, FakeCuda
from tests.calibration.bench.test_measure import TINY
from traincast.app.api import bench, measure
from traincast.calibration.bench import bench as benching
from traincast.calibration.bench import device as timing
from traincast.calibration.bench.bench import OpCall
from traincast.calibration.bench.collectives import CopyCall, CopyTask, list_copy_ways
from traincast.calibration.bench.device import Reference, run_series, run_timed, use_full_precision
from traincast.calibration.bench.devices import CudaDevice
from traincast.calibration.bench.parts import count_possible_ranks, measure_copies
from traincast.calibration.bench.plans import plan_benchmarks
from traincast.calibration.bench.rank import Prepared, measure_together
from traincast.calibration.bench.store import Store, open_device
from traincast.utils.errors import TraincastError


def opened(monkeypatch, **script):
    cuda = FakeCuda(**script).install(monkeypatch)
    device = CudaDevice()
    device.lead()  # learns how long a cycle takes
    cuda.calls.clear()
    return cuda, device


def test_without_a_gpu_the_reason_and_the_remedy_are_named(monkeypatch):
    with pytest.raises(TraincastError, match=r"built for CPUs alone: install a build for CUDA.*`device='cpu'`"):
        open_device("cuda")
    FakeCuda(available=False).install(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    with pytest.raises(TraincastError, match=r"no CUDA or ROCm device that torch can use: see whether nvidia-smi"):
        open_device("cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(TraincastError, match=r"sees no GPU with CUDA_VISIBLE_DEVICES='7': unset it"):
        open_device("cuda")


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    FakeCuda(devices=2).install(monkeypatch)
    with pytest.raises(TraincastError, match="no GPU 2; this machine has 2"):
        CudaDevice(2)


def test_a_gpu_that_runs_nothing_is_refused(monkeypatch):
    FakeCuda().install(monkeypatch).sticky = True
    with pytest.raises(TraincastError, match=r"GPU 0 cannot be used: CUDA error: .*; give `device='cpu'`"):
        CudaDevice()


@pytest.mark.parametrize("name", ["NVIDIA Fake 9000", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"])
def test_identity_names_the_gpu_and_its_libraries(monkeypatch, name):
    FakeCuda(name=name).install(monkeypatch)
    identity = CudaDevice().identity()
    assert (identity.device, identity.name, identity.memory_bytes) == ("cuda", name, 80 << 30)
    assert identity.libraries == "cuda 12.8 cudnn 90100"


def test_identity_of_a_rocm_device_says_hip(monkeypatch):
    FakeCuda(hip="6.2").install(monkeypatch)
    assert CudaDevice().identity().libraries.startswith("hip 6.2")


def test_a_store_of_another_gpu_is_refused(monkeypatch, tmp_path, small):
    cuda, device = opened(monkeypatch)
    Store(tmp_path, device.identity()).append(
        "a", benching.measure_task(device, Reference(device), next(plan_benchmarks(0)))
    )
    cuda.name = "NVIDIA Fake 9001"
    with pytest.raises(TraincastError, match="name NVIDIA Fake 9001 here, NVIDIA Fake 9000 in the store"):
        Store(tmp_path, CudaDevice().identity())


def test_a_locked_clock_is_part_of_the_identity_and_checked(monkeypatch, small):
    FakeCuda(clock=1410).install(monkeypatch)
    for locked in (0.0, 1400.0):
        device = open_device("cuda", locked_mhz=locked)
        assert device.identity().locked_clock_mhz == locked
        assert timing.check_locked(device, Reference(device).clock_mhz()) == []
    slower = CudaDevice(locked_mhz=1297.0)
    with pytest.raises(TraincastError, match=r"runs at 1410 MHz, not at 1297; lock it \(nvidia-smi -lgc 1297\)"):
        timing.check_locked(slower, Reference(slower).clock_mhz())
    (said,) = timing.check_locked(slower, 0.0)
    assert said.startswith("nobody here can be asked for the clock (pip install nvidia-ml-py): 1297 MHz is taken on")
    with pytest.raises(TraincastError, match="a CPU's clock cannot be locked from here"):
        open_device("cpu", locked_mhz=1297.0)


def test_the_clock_is_read_while_the_gpu_works(monkeypatch, small):
    cuda, device = opened(monkeypatch)
    waits = []
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda _: waits.append(cuda.waits) or 1410)
    assert Reference(device).clock_mhz() == 1410
    assert cuda.waits == waits[-1] + 1, "it was waited for after the clock was read"


def test_indices_go_where_the_op_runs(monkeypatch):
    cuda, device = opened(monkeypatch)
    OpCall(next(plan_benchmarks(0, ("_embedding_bag",))).signature, device)
    assert cuda.calls.count("to cuda:0") == 2, "indices and offsets"
    cuda.calls.clear()
    OpCall(next(plan_benchmarks(0, ("sparse_update",))).signature, device)
    assert cuda.calls.count("to cuda:0") == 1


@pytest.mark.parametrize(("memory", "pinned"), [("pinned", 1), ("pageable", 0)])
@pytest.mark.parametrize("direction", ["to device", "to host"])
def test_copies_go_both_ways_from_both_kinds_of_memory(monkeypatch, direction, memory, pinned):
    cuda = FakeCuda().install(monkeypatch)
    call = CopyCall(CopyTask(direction, memory, 64), CudaDevice(), sets=1)
    call(0)
    assert cuda.calls.count("pin_memory") == pinned
    assert len(list_copy_ways("cuda")) == 4


def gpu_step(batch_size):
    torch.zeros(1, device="cuda:0")
    return lambda: torch.ones(batch_size).sum()


def test_a_measured_step_comes_with_a_trace(monkeypatch, tmp_path, small):
    monkeypatch.setenv("TRAINCAST_HOME", str(tmp_path))
    FakeCuda().install(monkeypatch)
    measured = measure(gpu_step, device="cuda", repeats=3)
    assert measured.trace == str(tmp_path / "step-gpu_step.json")
    assert json.loads((tmp_path / "step-gpu_step.json").read_text())["traceEvents"][0]["cat"] == "kernel"
    assert f"trace: {measured.trace}" in measured.headline()


def test_short_steps_run_one_after_the_other_as_in_training(monkeypatch, tmp_path, small):
    monkeypatch.setenv("TRAINCAST_HOME", str(tmp_path))
    FakeCuda().install(monkeypatch)
    ran = []

    def make(batch_size):
        torch.zeros(1, device="cuda:0")
        return lambda: ran.append(1)

    measured = measure(make, device="cuda", repeats=3)
    assert len(ran) == 2 + 1 + 3 * 20 + 2, "warm-ups, one to see how long it takes, three blocks, two for the trace"
    assert measured.summary.median == pytest.approx(1e-3 / 20)


def test_a_step_that_ran_elsewhere_is_refused(monkeypatch, tmp_path, small):
    monkeypatch.setenv("TRAINCAST_HOME", str(tmp_path))
    cuda = FakeCuda().install(monkeypatch)

    def on_the_cpu(batch_size):
        return lambda: torch.ones(batch_size)

    with pytest.raises(TraincastError, match=r"on_the_cpu put nothing on the GPU; .*`device='cpu'`"):
        measure(on_the_cpu, device="cuda", repeats=3)
    assert cuda.is_initialized()
    with pytest.raises(TraincastError, match=r"gpu_step runs on a GPU, and this would time its launches alone"):
        measure(gpu_step, device="cpu", repeats=3)
    assert measure(on_the_cpu, device="cpu", repeats=3).identity.device == "cpu", "whatever ran on the GPU before"


def test_a_step_too_large_for_the_gpu_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("TRAINCAST_HOME", str(tmp_path))
    cuda = FakeCuda().install(monkeypatch)

    def make(batch_size):
        cuda.out_of_memory = True
        torch.zeros(1, device="cuda:0")

    with pytest.raises(TraincastError, match=r"make needs more memory than the cuda has.*give a smaller `batch_size`"):
        measure(make, device="cuda", repeats=3)
    cuda.out_of_memory, cuda.free = False, 1 << 30
    with pytest.raises(TraincastError, match=r"the tables of dlrm-default take 2.0 GB and 1.1 GB are free on the cuda"):
        measure("dlrm-default", device="cuda")


def test_tables_of_a_step_that_is_run_are_looked_up_everywhere(monkeypatch):
    """A capture reads no values and has zeros; a GPU that looked up row 0 alone would be too fast."""
    from traincast.calibration.measure import make_runnable
    from traincast.simulator.scenario.scenario import Scenario
    from traincast_evaluation.zoo.build import steps

    made = []
    monkeypatch.setattr(steps, "draw_host_batch", lambda *_: made.append("drawn") or steps.make_host_batch(*_))
    FakeCuda().install(monkeypatch)
    monkeypatch.setattr(steps.Setting, "prepare", lambda *_: torch.nn.Linear(1, 1))
    monkeypatch.setattr(torch.nn.Linear, "dense_parameters", torch.nn.Linear.parameters, raising=False)
    for drawn in (True, False):
        make_runnable(TINY, Scenario(batch_size=4, dtype="fp32"), "cuda", drawn=drawn).make_step()
    assert made == ["drawn"]


def test_ranks_are_as_many_as_gpus(monkeypatch):
    FakeCuda(devices=4).install(monkeypatch)
    assert count_possible_ranks(CudaDevice()) == 4
    with pytest.raises(TraincastError, match="`gpus` is 8 and this machine has 4"):
        measure("bert-large", device="cuda", gpus=8)
    with pytest.raises(TraincastError, match="DLRMs of several ranks are run here on CPUs"):
        measure("dlrm-ddp", device="cuda", gpus=2)


def test_collectives_wait_in_the_queue_one_behind_the_other(monkeypatch, small):
    """One rank here: what matters is that calls are timed by events, behind a barrier and behind a lead."""
    cuda, device = opened(monkeypatch)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        work = Prepared(lambda: cuda.calls.append("work"), lambda: cuda.calls.append("prepare"))
        taken = measure_together(work, Reference(device), 0.01, device, most=3)
    finally:
        dist.destroy_process_group()
    assert taken["step"] == taken["busy"] == pytest.approx([1e-3 / 10] * 3)
    end = len(cuda.calls) - cuda.calls[::-1].index("work")
    assert cuda.calls[end - 15 : end + 2] == [
        "synchronize", "prepare", "synchronize", f"sleep {device._lead_cycles}", "record", *["work"] * 10, "record",
        "synchronize",
    ]  # fmt: skip


def test_work_is_timed_between_two_events_after_waiting(monkeypatch):
    cuda, device = opened(monkeypatch)
    cuda.milliseconds = [2.5, 0.0]
    taken = run_timed(device, lambda: cuda.calls.append("work"))
    assert cuda.calls == ["synchronize", "record", "work", "record", "synchronize"]
    assert (taken.wall, taken.busy) == (2.5e-3, 2.5e-3)


def test_a_kernel_waits_in_the_queue_until_its_launch_is_done(monkeypatch):
    cuda, device = opened(monkeypatch)
    run_timed(device, lambda: cuda.calls.append("work"), queued=True)
    assert cuda.calls == ["synchronize", "sleep 500000", "record", "work", "record", "synchronize"], (
        "half of the million cycles that took a millisecond"
    )


def test_a_gpu_that_cannot_be_made_to_wait_is_timed_all_the_same(monkeypatch):
    cuda = FakeCuda().install(monkeypatch)
    cuda.sleeps = False
    assert run_timed(CudaDevice(), lambda: None, queued=True).wall == 1e-3


def test_an_event_is_not_read_before_it_has_passed(monkeypatch):
    _, device = opened(monkeypatch)
    with pytest.raises(RuntimeError, match="Both events must be completed"):
        device.elapsed(device.mark(), device.mark())


def test_tensors_are_made_on_the_gpu_in_the_type_asked_for(monkeypatch):
    cuda = FakeCuda(devices=4).install(monkeypatch)
    device = CudaDevice(3)
    cuda.calls.clear()
    for dtype in ("bfloat16", "float16", "int64", "uint8", "bool"):
        assert device.allocate((5,), dtype).dtype is getattr(torch, dtype)
    assert cuda.calls == ["randn on cuda:3"] * 2 + ["randint on cuda:3"] * 3


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda device: device.allocate((8, 4)), r"a tensor of 8 x 4 float32 does not fit"),
        (lambda device: device.put(torch.ones(3)), r"a tensor of 3 does not fit"),
        (lambda device: device.flush(), r"the buffer that empties the caches does not fit"),
    ],
)
def test_a_full_gpu_is_one_line(monkeypatch, use, said):
    cuda, device = opened(monkeypatch)
    cuda.out_of_memory = True
    with pytest.raises(TraincastError, match=f"{said}.*GPU 0; end other programs"):
        use(device)


def test_an_op_that_does_not_fit_is_left_out_and_the_run_goes_on(monkeypatch, tmp_path, small):
    cuda, device = opened(monkeypatch)
    store, left_out = Store(tmp_path, device.identity()), []
    cuda.free = 1 << 10
    tasks = [next(plan_benchmarks(0, (kind,))) for kind in ("relu", "gemm")]
    benching.run_benchmarks(device, store, tasks, failed=lambda task, why: left_out.append(why))
    assert len(left_out) == 2 and "GB are free" in left_out[0]
    cuda.free = 79 << 30
    assert benching.run_benchmarks(device, store, tasks, failed=lambda task, why: left_out.append(why)) == 2


def test_a_kernel_that_breaks_the_gpu_ends_the_run_and_keeps_what_was_measured(monkeypatch, tmp_path, small):
    cuda, device = opened(monkeypatch)
    store = Store(tmp_path, device.identity())

    def tasks():
        yield next(plan_benchmarks(0, ("relu",)))
        cuda.sticky = True
        yield next(plan_benchmarks(0, ("gemm",)))

    with pytest.raises(TraincastError, match=rf"answers nothing since aten::.* failed \({STICKY}\).*another `seed`"):
        benching.run_benchmarks(device, store, tasks())
    assert len(Store(tmp_path)) == 1


def test_memory_that_cannot_be_pinned_ends_copies_only(monkeypatch, tmp_path, small):
    cuda, device = opened(monkeypatch)
    store = Store(tmp_path, device.identity())
    monkeypatch.setattr("traincast.calibration.bench.parts._MOST_COPIES", 3)
    assert measure_copies(device, store, 0, inf, lambda: None) == []
    assert len(store) == 3
    cuda.sticky = True
    monkeypatch.setattr("traincast.calibration.bench.parts.Reference", lambda _: None)
    (said,) = measure_copies(device, store, 1, inf, lambda: None)
    assert said.startswith("a copy to device, pinned, failed: CUDA error")


def test_flushing_writes_more_than_the_caches_hold_and_makes_its_buffer_once(monkeypatch):
    monkeypatch.setattr("traincast.calibration.bench.devices._LEAST_FLUSHED", 64)
    cuda, device = opened(monkeypatch)
    cuda.cache = 4096
    for nbytes in (None, 1024, None):
        device.flush(nbytes)
    assert cuda.calls.count("zeros on cuda:0") == 1
    assert device._flushed.numel() * 4 == 4 * 4096
    cuda.memory = 1 << 16
    assert device._cache_bytes() == 1 << 13, "a small GPU, or a slice of one, has room for other things"
    monkeypatch.setattr(torch.version, "hip", "6.2")
    cuda.memory = 192 << 30
    assert device._cache_bytes() == 1 << 30


class NVMLError(Exception):
    """As pynvml's: of no other type."""


@pytest.mark.parametrize(
    ("clock", "shown"),
    [(1410, 1410.0), (ModuleNotFoundError("pynvml"), 0.0), (NVMLError("Not Supported"), 0.0), (RuntimeError(), 0.0)],
)
def test_the_clock_is_zero_where_nobody_can_be_asked(monkeypatch, small, clock, shown):
    FakeCuda(clock=clock).install(monkeypatch)
    device = CudaDevice()
    assert device.clock_mhz() == Reference(device).clock_mhz() == shown


def test_programs_that_hold_memory_of_the_gpu_are_noticed(monkeypatch):
    cuda, device = opened(monkeypatch)
    assert device.neighbours() == ""
    cuda.free = 40 << 30
    assert device.neighbours() == "other programs hold 42.9 GB of the GPU; end them"
    assert device.free_bytes() == 40 << 30


def test_a_throttled_gpu_is_told_of(monkeypatch, tmp_path, small, counted_budget):
    monkeypatch.setattr("traincast.calibration.here._measure_other_parts", lambda *_: [])
    monkeypatch.setattr("traincast.calibration.here._choose_plan", lambda _, seed: plan_benchmarks(seed, ("relu",)))
    cuda = FakeCuda().install(monkeypatch)
    clocks = iter([1410] * 2 + [1095] * 9)
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda _: next(clocks))
    cuda.free = 40 << 30
    done = bench(device="cuda", budget="1s", store=tmp_path)
    assert "the clock was 1410 MHz before and 1095 after: lock it, or let the device cool" in done.notes
    assert "other programs hold 42.9 GB of the GPU; end them" in done.notes
    assert done.identity.name == "NVIDIA Fake 9000" and done.total > 0


def test_a_series_on_the_gpu_holds_what_the_events_say(monkeypatch, small):
    cuda, device = opened(monkeypatch)
    # reference 1 ms, work 6 ms, reference 4 ms: each pair of events, and no time between pairs
    cuda.milliseconds = [1, 0, 6, 0, 4, 0, 6, 0, 4, 0, 6, 0, 4, 0]
    series = run_series(device, Reference(device), lambda: None, repeats=3)
    assert series.wall.tolist() == pytest.approx([6e-3] * 3)
    assert series.reference_wall.tolist() == pytest.approx([2e-3, 4e-3, 4e-3])


def test_the_reference_is_in_fp32_whatever_the_step_chose():
    settings = timing._find_precision_switches()
    held = [one.fp32_precision for one in settings]
    try:
        settings[0].fp32_precision = "tf32"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with use_full_precision():
                assert {one.fp32_precision for one in settings} == {"ieee"}
        assert settings[0].fp32_precision == "tf32"
    finally:
        for one, chosen in zip(settings, held, strict=True):
            one.fp32_precision = chosen


def test_the_one_switch_of_older_versions_is_put_back(monkeypatch):
    said = []
    monkeypatch.setattr(timing, "_find_precision_switches", list)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    monkeypatch.setattr(torch, "set_float32_matmul_precision", said.append)
    with use_full_precision():
        assert said == ["highest"]
    assert said == ["highest", "medium"]


def test_a_kind_of_device_that_nobody_knows_is_refused():
    with pytest.raises(TraincastError, match="unknown device 'tpu'"):
        open_device("tpu")
