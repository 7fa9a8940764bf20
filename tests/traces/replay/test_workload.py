"""A traced step as a workload: ops with their sizes, scopes, streams, events and collectives, saved and predicted."""

from __future__ import annotations

import json

import pytest

from tests.traces import damaged
from tests.traces.timelines import event, kernel, launch, rank_events, step
from traincast.app.api import load, load_trace, predict
from traincast.app.cli.main import main
from traincast.ir.ops import Phase
from traincast.traces.replay.analysis import TraceOptions, analyse_traces
from traincast.traces.replay.workload import trace_workload
from traincast.utils.errors import TraincastError

FLOATS = ["float", "float"]


def op(name, start, length, dims, types=None, tid=1, **more):
    return event("cpu_op", name, start, length, tid, **{"Input Dims": dims, "Input type": types or FLOATS, **more})


def copy_in(correlation, ts, nbytes):
    return event(
        "gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", ts, 40, 7, correlation=correlation, stream=7, bytes=nbytes
    )


def small_step():
    """A copy that waits, a product, an op without shapes, backward on another thread, a synchronisation."""
    return step(
        op("aten::copy_", 10, 70, [[256], [256]]), launch(1, 15, name="cudaMemcpyAsync"), copy_in(1, 25, 1024),
        event("cuda_runtime", "cudaStreamSynchronize", 30, 40, correlation=50),
        op("aten::mm", 100, 30, [[32, 64], [64, 16]]), launch(2, 110), kernel(2, 120, 30),
        event("cpu_op", "aten::cat", 140, 20), launch(3, 145), kernel(3, 155, 10, name="CatArrayBatchedCopy"),
        op("AddmmBackward0", 300, 40, [[32, 16]], ["float"], tid=2),
        op("aten::mm", 305, 30, [[64, 32], [32, 16]], tid=2), launch(4, 310, tid=2), kernel(4, 320, 30),
        event("cuda_runtime", "cudaDeviceSynchronize", 500, 10, correlation=51),
    )  # fmt: skip


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.json"
    path.write_text(json.dumps({"traceEvents": small_step()}))
    return trace_workload(analyse_traces([path]), name="small")


def test_ops_keep_their_sizes_and_their_order(small):
    (program,) = small.programs
    names = [o.name for o in program.ops]
    assert names == ["aten::copy_", "aten::mm", "trace::aten::cat", "aten::mm", "cuda::device_synchronize"]
    copied, product, *_ = program.ops
    assert [t.spec.device for t in copied.inputs] == ["cuda", "cpu"]
    assert copied.inputs[0].spec.nbytes == 1024
    assert copied.signature.scalar("non_blocking") is False  # its op waited for it
    assert [t.spec.shape for t in product.inputs] == [(32, 64), (64, 16)]
    assert product.outputs[0].spec.shape == (32, 16)


def test_scopes_have_threads_phases_and_joins(small):
    scopes = small.programs[0].scopes
    backward = next(s for s in scopes if s.name == "AddmmBackward0")
    assert (backward.thread, backward.phase) == (1, Phase.BACKWARD)
    assert scopes[backward.after].name == "aten::cat"
    assert scopes[-1].name == "cuda::device_synchronize"
    assert scopes[scopes[-1].after].name == "AddmmBackward0"


def test_what_is_missing_is_said(small):
    assert "aten::cat" in small.meta["missing"]
    assert "row-major" in small.meta["assumed"]
    assert small.batch_size == 32
    with pytest.raises(TraincastError, match="made from a trace"):
        small.resized(batch_size=64)


def test_it_is_saved_and_predicted(small, tmp_path, capsys):
    path = tmp_path / "small.json"
    assert main(["trace", str(path), "--workload-out", str(tmp_path / "out.tc")]) == 0
    assert "missing: no shapes recorded" in capsys.readouterr().out
    result = predict(tmp_path / "out.tc", on="v100")
    assert result.iteration == predict(small, on="v100").iteration
    assert 0 < result.device_active < result.iteration


def test_recorded_strides_and_arguments_are_taken(tmp_path):
    turned = {"Input Strides": [[1, 512], [16, 1]]}
    convolution = {
        "Input Strides": [[9408, 196, 14, 1], [432, 9, 3, 1], [], [], [], [], [], [], []],
        "Concrete Inputs": ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"],
    }
    types = ["float", "float", "", "ScalarList", "ScalarList", "ScalarList", "Scalar", "ScalarList", "Scalar"]
    events = step(
        op("aten::mm", 10, 30, [[512, 64], [64, 16]], **turned), launch(1, 20), kernel(1, 30, 30),
        op("aten::convolution", 50, 30, [[4, 48, 14, 14], [96, 48, 3, 3], *([[]] * 7)], types, **convolution),
        launch(2, 60), kernel(2, 70, 30, name="implicit_gemm"),
    )  # fmt: skip
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    product, convolved = trace_workload(analyse_traces([tmp_path]), name="t").programs[0].ops
    assert product.inputs[0].spec.stride == (1, 512)
    assert convolved.outputs[0].spec.shape == (4, 96, 7, 7)
    assert convolved.signature.scalar("stride") == (2, 2)


def test_collectives_meet_again(tmp_path):
    for rank, events in enumerate((rank_events(100, wait_us=300), rank_events(400))):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps({"traceEvents": events}))
    workload = trace_workload(analyse_traces([tmp_path]), name="two")
    assert workload.ranks == (0, 1)
    for program in workload.programs:
        (exchanged,) = (o for o in program.ops if o.signature.scalar("collective"))
        assert exchanged.name == "c10d::allreduce_"
        assert exchanged.signature.scalar("group") == (0, 1)
        assert exchanged.signature.scalar("bytes") == 4096
        assert exchanged.stream == program.ops[-1].stream  # which the host then waits for
    assert predict(workload, on="dgx1-v100").gpus == 2


def test_a_kernel_that_waited_for_a_collective_does_so_again(tmp_path):
    wait = event("cuda_runtime", "cudaStreamWaitEvent", 200, 3, correlation=60)
    behind = [op("aten::mm", 210, 30, [[8, 8], [8, 8]]), launch(70, 220), kernel(70, 700, 10)]
    begin = [op("aten::mm", 11, 30, [[8, 8], [8, 8]]), launch(71, 20), kernel(71, 30, 10)]
    for rank in (0, 1):
        events = [e for e in rank_events(100, wait_us=500) if "Synchronize" not in e["name"]]
        (tmp_path / f"rank{rank}.json").write_text(json.dumps({"traceEvents": [*events, wait, *begin, *behind]}))
    program = trace_workload(analyse_traces([tmp_path]), name="two").programs[0]
    names = [(o.name, o.signature.scalar("event"), o.stream) for o in program.ops]
    assert names == [
        ("aten::mm", None, 0), ("cuda::event_record", 0, 0), ("cuda::stream_wait_event", 0, 1),
        ("c10d::allreduce_", None, 1), ("cuda::event_record", 1, 1), ("cuda::stream_wait_event", 1, 0),
        ("aten::mm", None, 0),
    ]  # fmt: skip


def test_the_python_api_loads_a_step(tmp_path):
    path = tmp_path / "small.json"
    path.write_text(json.dumps({"traceEvents": small_step()}))
    workload = load_trace(path, step=3)
    assert (workload.name, workload.meta["step"][:3]) == ("small", "3, ")
    with pytest.raises(TraincastError, match="unknown step '4'"):
        load_trace(path, step=4)


def test_damaged_ranks_are_read_or_refused(tmp_path, capsys):
    folder = tmp_path / "ranks"
    folder.mkdir()
    (folder / "rank0.json").write_text(json.dumps({"traceEvents": rank_events(100, wait_us=300)}))
    out = str(tmp_path / "w.tc")
    for sound in (rank_events(400), small_step()):
        data = json.dumps({"traceEvents": sound}, indent=1).encode()
        for _, bad in [*damaged.flips(data, 25, seed=11), *damaged.truncations(data, 5), *damaged.wrong_values()[::7]]:
            (folder / "rank1.json").write_bytes(bad)
            assert main(["trace", str(folder), "--on", "dgx1-v100", "--workload-out", out]) in (0, 2)
            assert capsys.readouterr().err.count("\n") <= 1


PUBLIC = {
    "kineto_resnet50_v100/num_workers_4.json.gz": ("v100-dgxs", 0.15),
    "triosim_vgg13_h100": ("h100", 0.15),  # -7 %: it turns every layout, where ResNet-50 on H100 turns half
    "param_dlrm_8xv100": ("dgx1-v100", 0.30),
}


@pytest.mark.parametrize("file", PUBLIC)
def test_public_traces_become_workloads(shared_data, tmp_path, file):
    """As a workload the step has the device time that the trace itself is predicted to have."""
    platform, most = PUBLIC[file]
    assert main(["trace", str(shared_data / "traces" / file), "--workload-out", str(tmp_path / "w.tc"), "--json"]) == 0
    workload = load(tmp_path / "w.tc")
    report = analyse_traces([shared_data / "traces" / file], TraceOptions(platform=None))
    tf32 = "tf32" if "TF32" in workload.meta.get("notes", "") else "fp32"
    result = predict(workload, on=platform, dtype=tf32)
    measured = sorted(s.compute for s in report.ranks[0].steps)
    active = result.device_active if len(workload.ranks) == 1 else result.ranks[0].compute
    assert active == pytest.approx(measured[len(measured) // 2], rel=most)
    assert result.iteration > 0


def exchange(sent, received, *, group="[0, 1]", size=2):
    """A step with one all-to-all whose metadata were recorded."""
    metadata = {
        "Collective name": "all_to_allv", "In msg nelems": sum(sent), "Out msg nelems": sum(received), "dtype": "Float",
        "In split size": str(sent), "Out split size": str(received), "Process Group Name": "7", "Group size": size,
        "Process Group Ranks": group,
    }  # fmt: skip
    return step(
        event("cpu_op", "record_param_comms", 10, 30, **metadata), launch(1, 20),
        kernel(1, 40, 50, stream=20, name="ncclDevKernel_SendRecv"),
    )  # fmt: skip


def test_uneven_exchanges_keep_their_splits(tmp_path):
    for rank, (sent, received) in enumerate((([256, 768], [256, 512]), ([512, 128], [768, 128]))):
        document = {"traceEvents": exchange(sent, received), "distributedInfo": {"rank": rank, "world_size": 2}}
        (tmp_path / f"r{rank}.json").write_text(json.dumps(document))
    workload = load_trace(tmp_path)
    first, second = (program.ops[-1].signature for program in workload.programs)
    assert first.scalar("collective") == second.scalar("collective") == "all_to_all_v"
    assert (first.scalar("send_splits"), first.scalar("recv_splits")) == ((1024, 3072), (1024, 2048))
    assert (second.scalar("send_splits"), second.scalar("recv_splits")) == ((2048, 512), (3072, 512))
    assert predict(workload, on="dgx1-v100").gpus == 2


def test_ranks_that_were_not_traced(tmp_path):
    document = {"traceEvents": exchange([128] * 4, [128] * 4, group="[0, 1, 2, 3]", size=4)}
    document["distributedInfo"] = {"rank": 0, "world_size": 4}
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(document))
    workload = load_trace(path)
    assert workload.ranks == (0, 0, 0, 0)
    assert "1 of 4 ranks were traced" in workload.meta["notes"]
    assert predict(workload, on="dgx1-v100").gpus == 4
    document["traceEvents"] = exchange([128, 128], [128, 128], group="[0, 2]")
    path.write_text(json.dumps(document))
    with pytest.raises(TraincastError, match="give the traces of all ranks"):
        load_trace(path)


def test_a_traced_step_becomes_data_parallel(shared_data):
    workload = load_trace(shared_data / "traces/kineto_resnet50_v100/num_workers_4.json.gz")
    result = predict(workload, on="dgx1-v100", gpus=4)
    reduced = [o.signature for o in result.timeline.program.ops if o.signature.scalar("collective") == "all_reduce"]
    assert sum(s.scalar("bytes") for s in reduced) == pytest.approx(102.2e6, rel=0.01)  # ResNet-50's gradients
