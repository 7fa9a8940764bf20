"""Pages about measured traces, letter by letter."""

from __future__ import annotations

import pytest

from tests.traces.timelines import event, kernel, launch, small_events, write_trace, write_two_ranks
from traincast.app.report.compared import format_gains
from traincast.app.report.measured import TOP, format_measured, format_together
from traincast.hardware.platform import load_platform
from traincast.traces.replay.analysis import TraceOptions, analyse_traces

PAGE = """\
Rank 0: small.json

step    ms  active  idle  exposed comm  kernels  replayed ms   error
────  ────  ──────  ────  ────────────  ───────  ───────────  ──────
   3  1.00     42%   58%          0.0%        2         1.00  +0.00%

Where the median step goes
  compute                               0.420 ms  42%  ████████████▋
  exposed communication                 0.000 ms   0%  
  idle: host-bound                      0.545 ms  55%  ████████████████▍
  idle: host in a synchronisation       0.005 ms   0%  ▏
  idle: a stream waited for another     0.000 ms   0%  
  idle: before graph nodes              0.000 ms   0%  
  idle: launched, not yet started       0.030 ms   3%  ▉
    idle: host-bound: most of it while the host is between ops
    idle: launched, not yet started: most of it before volta_sgemm_128x64

Kernels (device time of the median step)
  gemm                                        0.400 ms  ████████████
  elementwise                                 0.020 ms  ▋

Ops (device time of the median step)
  aten::mm                                    0.400 ms  ████████████
  aten::add                                   0.020 ms  ▋

Kernels with most time (per step)
kernel                         family       count  mean us     ms  share
─────────────────────────────  ───────────  ─────  ───────  ─────  ─────
volta_sgemm_128x64             gemm             1    400.0  0.400  95.2%
vectorized_elementwise_kernel  elementwise      1     20.0  0.020   4.8%

Rates by op and shape
op         shapes       in    count  mean us     ms  TFLOP/s  of peak  TB/s  of peak
─────────  ───────────  ────  ─────  ───────  ─────  ───────  ───────  ────  ───────
aten::mm   64x64 64x64  fp32      1    400.0  0.400      0.0           0.00
aten::add  64 64        fp32      1     20.0  0.020                    0.00

Launches: from the call to its kernel
step  calls  waiting before  at most  held by a full queue  delay us  95 % below us  kernels < 10 us  their ms
────  ─────  ──────────────  ───────  ────────────────────  ────────  ─────────────  ───────────────  ────────
   3      2               0        1                     0       140            239                0     0.000

host overhead          per step ms  count  mean us  median us  p95 us  most of it in
─────────────────────  ───────────  ─────  ───────  ─────────  ──────  ─────────────
T1 between ops               0.116      2     58.0       38.0    78.0  python
T2 before launch             0.030      2     15.0       10.0    20.0  aten::mm
T3 after launch              0.050      2     25.0       20.0    30.0  aten::mm
T4 runtime calls             0.013      3      4.3        6.0     6.0  launch
T5 ops without launch        0.020      1     20.0       20.0    20.0  aten::view
  without what recording adds: 0.020 ms of a step

Critical path (share of the steps' time, what would save most first)
  host                                     100.0%  ██████████████████████████████
  of which under these ops:
    between ops                             98.0%
    aten::mm                                 1.0%
    aten::add                                1.0%

Twice as fast, a step is shorter by
  host                                      50.0%  ███████████████
  aten::mm                                   3.0%  ▉
  aten::add                                  2.0%  ▋
  nothing by: elementwise, gemm, late start"""  # noqa: W291 - an empty bar

NOTE = "no ProfilerStep marker: the whole trace counts as one step; name another with `step_marker`"

TOGETHER = """\
All 2 ranks: median step 0.485 ms, exposed communication 10.3%, imbalance 0.0%

Collectives over ranks (means of one call)
collective  bytes  group  ranks  count  transfer ms  bus GB/s  others waited ms  at most ms  came last
──────────  ─────  ─────  ─────  ─────  ───────────  ────────  ────────────────  ──────────  ───────────────
all_reduce  4,096      -      2      1        0.050       0.1             0.300       0.300  rank 1 (1 of 1)

Replayed together: 1 collectives end when the last rank has come and the transfer is done (clocks agree to 0.0 us)
rank  step     ms  replayed ms   error  exposed comm ms  replayed ms  waited ms  came last
────  ────  ─────  ───────────  ──────  ───────────────  ───────────  ─────────  ─────────
   0     3  0.485        0.485  +0.00%            0.350        0.350      0.300    0 times
   1     3  0.485        0.485  +0.00%            0.050        0.050      0.000     1 time
  slowest rank: 0.485 ms measured, 0.485 replayed (+0.00%)

Critical path over ranks: begins on rank 1, 0.000 ms after the first rank began
  rank 1                                            96.9%  █████████████████████████████▏
  rank 0                                             3.1%  ▉
  of which under these ops:
    rank 1, aten::mm                                85.6%
    rank 1, c10d::allreduce_                        11.3%
    rank 0, between ops                              3.1%

Twice as fast, the run over all ranks is shorter by
  host                                              44.8%  █████████████▌
  rank 1                                            43.3%  █████████████
  aten::mm                                          40.7%  ████████████▎
  c10d::allreduce_                                   6.2%  █▉
  communication                                      5.2%  █▌
  nothing by: rank 0"""

# what each section of a prediction shows; its figures are those of kernel models and host profiles
SECTIONS = (
    "Prediction on v100 (host profile study-2022 times 1.29): ",
    "step  measured ms  predicted ms   error  = simulation  + kernels  + overheads",
    "Kernels, per step",
    "family       measured ms  predicted ms  error  changes the step by ms",
    "op (furthest off first)  measured ms  predicted ms  error",
    "Host time, per step, the profiler's cost included",
    "overhead               measured ms  pooled ms  error  changes the step by ms",
    "type   op (furthest off first)  measured ms  pooled ms  error",
)


@pytest.fixture
def small(tmp_path):
    return write_trace(tmp_path / "small.json", small_events())


def test_the_page_of_a_rank(small):
    verdict, _, page = format_measured(analyse_traces([small]), full=True).partition("\n\n")

    assert page == PAGE
    assert verdict.startswith(
        "1.00 ms per step, held by the host (100% of the critical path): the device is busy 42%, "
        "idle: host-bound 55%.\n"
    )


def test_the_first_screen_has_the_culprit_and_no_more_than_a_screen(small):
    lines = format_measured(analyse_traces([small])).splitlines()

    assert lines[1] == "One step. Code between ops is 98% of the path: no op is on record there."
    assert len(lines) < 45


def test_the_page_over_ranks_comes_right_after_the_verdict(tmp_path):
    report = analyse_traces([write_two_ranks(tmp_path)])

    assert format_together(report.together, TOP) == TOGETHER
    verdict, *pages = format_measured(report, full=True).split(TOGETHER)
    assert verdict.startswith("0.485 ms per step over 2 ranks, held by rank 1 (") and verdict.count("\n") <= 5
    assert len(pages) == 1 and pages[0].startswith("\n\nRank 0")


def test_a_prediction_is_shown_section_by_section(small):
    question = TraceOptions(platform=load_platform("v100"), host="study-2022")

    page = format_measured(analyse_traces([small], question), full=True)

    places = [page.index(section) for section in SECTIONS]
    assert places == sorted(places)
    assert page.partition("\n\n")[2].startswith(PAGE)


def test_a_scaled_host_says_so(small):
    question = TraceOptions(platform=load_platform("v100"), host="study-2022", host_scale=2.0)

    page = format_measured(analyse_traces([small], question), full=True)

    assert "Prediction on v100 (host profile study-2022 times 2.00): " in page


def test_a_prediction_of_several_ranks_names_topology_and_stages(tmp_path):
    question = TraceOptions(platform=load_platform("dgx1-v100"), host="study-2022")

    page = format_measured(analyse_traces([write_two_ranks(tmp_path)], question), full=True)

    assert "Predicted together (collectives on dgx1-v100; ranks begin when they did): GMAE " in page
    assert "error  = simulation  + kernels  + collectives  + overheads  exposed comm ms  predicted ms" in page


def test_what_was_odd_is_noted_below_the_title(tmp_path):
    path = write_trace(tmp_path / "bare.json", small_events()[1:])

    lines = format_measured(analyse_traces([path]), full=True).partition("\n\n")[2].splitlines()

    assert lines[0] == "Rank 0: bare.json"
    assert " ".join(" ".join(lines[1:3]).split()) == f"note: {NOTE}"


def test_gains_too_small_to_show_are_named_together():
    assert format_gains({"gemm": 0.5, "copy": 0.0004, "index": 0.0}, width=10) == [
        "  gemm        50.0%  ███████████████",
        "  nothing by: copy, index",
    ]
    assert format_gains({"gemm": 0.1}, width=4) == ["  gemm  10.0%  ███"]


def test_of_many_steps_the_first_are_shown_and_the_rest_counted(tmp_path):
    events = [launch(1, 10), kernel(1, 20, 100)]
    events += [event("user_annotation", f"ProfilerStep#{n}", 1000 * n, 900 + 10 * (n == 24)) for n in range(25)]

    text = format_measured(analyse_traces([write_trace(tmp_path / "t.json", events)]), full=True)

    assert "5 more in the JSON; of all: shortest 0.910, median 1.00, longest 1.00 ms" in text
