"""What the page says only of some predictions: marked ops, warnings, many ranks, compiled steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

import traincast
from tests.simulator.rank_programs import RankProgram, predict
from traincast.app.report.chrome import make_chrome_trace
from traincast.app.report.prediction import format_prediction
from traincast.simulator.prediction.breakdown import OutsideOp
from traincast.simulator.prediction.rank_results import Note


@pytest.fixture(scope="module")
def result():
    return traincast.predict("resnet50", on="v100", batch_size=4)


def lines_with(result, start):
    """Lines below the verdict."""
    text = format_prediction(result, full=True)
    return [line for line in text.partition("\n\n")[2].splitlines() if start in line]


def test_warnings_are_the_last_lines(result):
    page = format_prediction(replace(result, warnings=("first", "second")))

    assert page.splitlines()[-2:] == ["warning: first", "warning: second"]


def test_notes_are_called_notes_and_come_after_warnings(result):
    page = format_prediction(replace(result, warnings=(Note("as usual"), "too large")))

    assert page.splitlines()[-2:] == ["warning: too large", "note: as usual"]


@pytest.mark.parametrize(
    ("ops", "said"),
    [
        (("aten::a",), "aten::a"),
        (tuple(f"aten::{letter}" for letter in "abcde"), "aten::a, aten::b, aten::c, aten::d, aten::e"),
        (tuple(f"aten::{letter}" for letter in "abcdefg"), "aten::a, aten::b, aten::c, aten::d, aten::e and 2 more"),
    ],
)
def test_marked_ops_have_their_share_of_kernel_time(result, ops, said):
    kernels = sum(result.by_family.values())
    marked = replace(result, estimated_ops=ops, estimated_seconds=0.25 * kernels)

    (line,) = lines_with(marked, "of kernel time")
    assert line == f"25% of kernel time without a kernel model (costed from bytes and flops): {said}"


def outside(op, shift, factor=1.0, *, new_gpu=False):
    return OutsideOp(op=op, seconds=1e-3, shift=shift, factor=factor, new_gpu=new_gpu)


def test_ops_outside_are_named_by_what_they_may_shift_how_far_and_why(result):
    ops = (outside("aten::mm", 0.05, 8.04), outside("aten::bmm", 0.081, new_gpu=True), outside("aten::sum", 0.06))

    (line,) = lines_with(replace(result, outside=ops), "outside what was fitted")
    assert line == (
        "outside what was fitted, by standard deviation of the step: aten::bmm 8% (GPU not measured), "
        "aten::sum 6% (kind or type not measured), aten::mm 5% (sizes up to 8.0 x beyond)"
    )


def test_ops_outside_that_do_not_matter_for_the_step_are_not_named(result):
    assert lines_with(replace(result, outside=(outside("aten::mm", 0.0399, 1e6),)), "outside what was fitted") == []


def test_of_many_ops_outside_three_are_named(result):
    ops = tuple(outside(f"aten::{letter}", 0.05) for letter in "abcde")

    (line,) = lines_with(replace(result, outside=ops), "outside what was fitted")
    assert line.endswith("aten::c 5% (kind or type not measured) and 2 more")


def test_a_page_without_marked_ops_says_nothing_of_them(result):
    quiet = replace(result, estimated_ops=(), outside=())

    assert lines_with(quiet, "of kernel time") == lines_with(quiet, "outside what was fitted") == []


def test_shares_of_the_step_and_of_kernels_are_percent(result):
    (active,) = lines_with(result, "device active")
    assert f"{result.device_active / result.iteration:.1%}" in active
    (conv,) = [line for line in format_prediction(result).splitlines() if line.startswith("conv")]
    assert f"{result.by_family['conv'] / sum(result.by_family.values()):.1%}" in conv


def test_sources_and_host_profile_are_named(result):
    (line,) = lines_with(result, "host profile")
    assert line.startswith(f"{len(result.timeline.launches)} kernels; durations: ")
    assert line.endswith(f"host profile: {result.host_profile}")


def test_one_gpu_has_no_table_of_ranks(result):
    assert "exposed" not in format_prediction(result)


def test_a_compiled_inference_says_so_in_its_first_line():
    compiled = traincast.predict("bert-large", on="a100-40gb", batch_size=1, mode="inference", compiled=True)

    assert format_prediction(compiled).splitlines()[0] == (
        "bert-large (inference, compiled) on NVIDIA A100-SXM4-40GB, batch 1, 512 tokens"
    )


@pytest.fixture(scope="module")
def many():
    """Forty ranks, each with more to compute than the one before."""
    group = tuple(range(40))
    programs = [RankProgram().compute(256 + 16 * rank, 2).collective(group=group) for rank in group]
    return predict(*programs, ranks=group)


def test_of_many_ranks_those_that_compute_longest_are_shown(many):
    lines = format_prediction(many).splitlines()

    rows = [line.split("  ")[0].strip() for line in lines if line.startswith("rank ")]
    assert rows[0] == "rank 39"
    assert len(rows) == 16
    assert "and 24 ranks that compute less" in lines


def test_the_busiest_rank_is_set_against_the_mean(many):
    (line,) = [line for line in format_prediction(many).splitlines() if line.startswith("the busiest rank")]

    assert line.startswith(f"the busiest rank computes {many.imbalance:.1%} longer than the mean; ")
    assert "on rank 39" in line


def test_of_many_ranks_a_trace_has_those_on_the_critical_path_first(many):
    events = make_chrome_trace(many)["traceEvents"]

    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    devices = [name for name in processes if name.endswith("device")]
    assert len(devices) == 32
    assert "rank 39: device" in devices
    assert "rank 0: device" in devices
