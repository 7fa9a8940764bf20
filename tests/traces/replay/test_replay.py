"""The simulation, fed with measured times, gives back the measured steps; and the command that shows it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.traces import damaged
from tests.traces.timelines import event, kernel, launch, linked, step
from traincast.app.cli.main import main
from traincast.traces.collectives import find_collectives
from traincast.traces.kineto import read_kineto
from traincast.traces.link import link_trace
from traincast.traces.replay.steps import simulate_replay
from traincast.traces.replay.timeline import make_timeline_instructions

MARKED = [
    "kineto_resnet50_v100/num_workers_0", "kineto_resnet50_v100/num_workers_4", "hta_recsys_a100_rank3of8/kineto_rank3",
    "tracelens_mi300x_resnet/kineto_rank0of8", "hta_critical_path/cuda_event_sync",
    *(f"param_dlrm_8xv100/kineto_rank{rank}" for rank in range(8)),
]  # fmt: skip


def replayed(tied):
    return simulate_replay(tied, make_timeline_instructions(tied))


def synchronised_step():
    """The host launches 300 us of work in 20 us, then waits for it: the step ends when the device does."""
    return step(
        event("cpu_op", "aten::mm", 0, 20), launch(1, 5), kernel(1, 12, 300),
        event("cpu_op", "aten::item", 30, 290), event("cuda_runtime", "cudaStreamSynchronize", 35, 279, correlation=2),
        length=330,
    )  # fmt: skip


def test_a_synchronised_step_is_simulated_to_its_measured_length(tmp_path):
    (simulated,) = replayed(linked(tmp_path, synchronised_step())).steps
    assert simulated.simulated == pytest.approx(simulated.measured, abs=3e-6)


def test_a_longer_kernel_makes_the_replayed_step_longer(tmp_path):
    """The wait is simulated, not copied from the trace."""
    tied = linked(tmp_path, synchronised_step())
    instructions = make_timeline_instructions(tied)

    (slower,) = simulate_replay(tied, replace(instructions, kernel_seconds=2 * instructions.kernel_seconds)).steps

    (simulated,) = replayed(tied).steps
    assert slower.simulated - simulated.simulated == pytest.approx(300e-6, abs=5e-6)


def test_a_blocking_copy_is_not_counted_twice(tmp_path):
    copy = event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 20, 500, 7, correlation=1, stream=7, device=0)
    events = step(
        event("cpu_op", "aten::to", 0, 540), launch(1, 10, 505, name="cudaMemcpyAsync"), copy,
        event("cuda_runtime", "cudaStreamSynchronize", 516, 8, correlation=2), length=550,
    )  # fmt: skip
    (simulated,) = replayed(linked(tmp_path, events)).steps
    assert simulated.simulated == pytest.approx(550e-6, rel=0.01)


@pytest.mark.parametrize("file", MARKED)
def test_public_steps_are_replayed(shared_data, file):
    for simulated in replayed(link_trace(read_kineto(shared_data / f"traces/{file}.json.gz"))).steps:
        assert abs(simulated.error) < 0.03


def test_collectives_have_kind_size_and_group(shared_data):
    traces = shared_data / "traces"
    found = find_collectives(link_trace(read_kineto(traces / "param_dlrm_8xv100/kineto_rank0.json.gz")))
    assert sorted(c.kind for c in found) == ["all_reduce"] * 3 + ["all_to_all"] * 5
    assert max(c.message_bytes for c in found) == 4 * 394241
    amd = find_collectives(link_trace(read_kineto(traces / "tracelens_mi300x_resnet/kineto_rank0of8.json.gz")))
    launched = [c for c in amd if c.step >= 0]
    assert {c.kind for c in launched} == {"all_reduce", "broadcast"}
    assert all((c.group, c.group_size, c.group_ranks) == ("0", 8, tuple(range(8))) for c in launched)


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(damaged.kineto_document()))
    return path


def test_the_verb_prints_a_page(trace_file, capsys):
    assert main(["trace", str(trace_file), "--full"]) == 0
    out = capsys.readouterr().out
    assert "Rank 0: trace.json" in out and "Test GPU" in out
    assert "idle: host-bound" in out
    assert "T2 before launch" in out


def test_the_verb_gives_one_json_document(trace_file, capsys):
    assert main(["trace", str(trace_file), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    first = document["ranks"][0]["steps"][0]
    assert first["kernels"] == 6
    assert first["iteration_ms"] == pytest.approx(0.156)
    parts = sum(first[f"{name}_ms"] for name in ("compute", "exposed_comm", "idle"))
    assert parts == pytest.approx(first["iteration_ms"])


def test_the_timeline_shows_measured_and_replayed_kernels(trace_file, tmp_path, capsys):
    out = tmp_path / "timeline.json"
    assert main(["trace", str(trace_file), "--trace-out", str(out)]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    by_process = [e["pid"] for e in events if e["ph"] == "X" and e["cat"] == "kernel"]
    assert by_process.count(1) == by_process.count(2) == 12
    assert sum(e["ph"] == "s" for e in events) == sum(e["ph"] == "f" for e in events) == 12


def test_damage_gives_exit_code_2_and_one_line(tmp_path, capsys):
    path = tmp_path / "trace.json"
    for _, data in [*damaged.oddities()[:20], *damaged.flips(b"{}" * 40, 10)]:
        path.write_bytes(data)
        code = main(["trace", str(path)])
        error = capsys.readouterr().err
        assert code in (0, 2)
        assert "Traceback" not in error
        assert error.count("\n") == (code == 2)


def test_every_damaged_timeline_that_is_read_is_also_analysed(tmp_path, capsys):
    path = tmp_path / "trace.json"
    document = json.dumps(damaged.kineto_document(), indent=1).encode()
    for _, data in [
        *damaged.truncations(document, 12),
        *damaged.flips(document, 40, seed=5),
        *damaged.wrong_values()[::3],
    ]:
        path.write_bytes(data)
        assert main(["trace", str(path)]) in (0, 2)
        capsys.readouterr()


@pytest.mark.parametrize("file", MARKED)
def test_the_device_is_replayed_too(shared_data, file):
    """From a step's first kernel to its last. When kernels start is simulated, also where the host never waits."""
    tied = link_trace(read_kineto(shared_data / f"traces/{file}.json.gz"))
    simulated = replayed(tied)
    for index in range(len(tied.steps)):
        mine = (tied.step[simulated.kernel_row] == index) & (tied.launch[simulated.kernel_row] >= 0)
        rows = simulated.kernel_row[mine]
        measured = 1e-9 * (tied.end[rows].max() - tied.events["start"][rows].min())
        assert simulated.kernel_end[mine].max() - simulated.kernel_start[mine].min() == pytest.approx(
            measured, rel=0.03
        )
