"""Several ranks of one run: their collectives matched, their clocks aligned, replayed and explained together."""

from __future__ import annotations

import json

import pytest

from tests.traces.timelines import event, kernel, launch, linked, rank_events, step
from traincast.app.cli.main import main
from traincast.hardware.platform import load_platform
from traincast.traces.breakdown import compute_breakdown
from traincast.traces.collectives import find_collectives, match_collectives
from traincast.traces.kineto import read_kineto
from traincast.traces.link import link_trace
from traincast.traces.replay.analysis import TraceOptions, analyse_traces
from traincast.traces.replay.steps import simulate_replay
from traincast.traces.replay.timeline import make_timeline_instructions
from traincast.traces.replay.together import replay_ranks
from traincast.traces.slowdowns import compute_slowdowns
from traincast_evaluation.suites.replay import replayed_ranks, summarise_replayed_ranks

CLOCK_OFF_US = 5_000_000


@pytest.fixture
def two_ranks(tmp_path):
    """Rank 1 comes 300 us later than rank 0 and its clock is five seconds ahead."""
    for rank, events in enumerate((rank_events(100, wait_us=300), rank_events(400, clock=CLOCK_OFF_US))):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps({"traceEvents": events}))
    return tmp_path


def test_clocks_are_aligned_by_where_collectives_end(two_ranks):
    together = analyse_traces([two_ranks]).together
    (match,) = together.replay.matches.collectives
    assert match.kind == "all_reduce"
    assert match.seconds == pytest.approx(50e-6)
    assert together.replay.matches.offset.tolist() == pytest.approx([0.0, 1e3 * CLOCK_OFF_US])
    assert together.replay.matches.spread == 0.0


def test_a_rank_waits_for_the_last_one(two_ranks):
    together = analyse_traces([two_ranks]).together
    early, late = together.replay.ranks
    assert [r.replay.steps[0].error for r in (early, late)] == pytest.approx([0, 0], abs=1e-9)
    assert early.exposed[0] == pytest.approx((350e-6, 350e-6))
    assert (early.waited, early.last) == (pytest.approx(300e-6), 0)
    assert (late.waited, late.last) == (pytest.approx(0), 1)


def test_the_path_over_ranks_goes_to_the_late_one(two_ranks):
    path = analyse_traces([two_ranks], TraceOptions(twice=("aten::mm",))).together.path
    segments = path.segments
    assert all(a.end == pytest.approx(b.start) for a, b in zip(segments, segments[1:], strict=False))
    assert segments[0].rank == 1
    assert path.by_rank[1] > 0.7
    assert path.by_place[1, "aten::mm"] > 0.5
    # half of rank 1's 395 us in the product lets both go on earlier; half of rank 0's time helps nobody
    assert path.faster["rank 1"] > 0.3
    assert path.faster["aten::mm"] == pytest.approx(0.4, abs=0.05)
    assert next(iter(path.faster)) == "aten::mm"


def test_a_transfer_twice_as_fast_ends_earlier_for_all(two_ranks):
    path = analyse_traces([two_ranks], TraceOptions(twice=("communication",))).together.path
    run = path.segments[-1].end
    assert path.faster["communication"] == pytest.approx(25e-6 / run, rel=0.02)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (rank_events(400, size=2048), "all_reduce of 8192 bytes"),
        (rank_events(400, kind="broadcast"), "broadcast"),
        (rank_events(400, collectives=2), "has 2 collectives"),
    ],
)
def test_ranks_that_contradict_each_other_are_not_matched(tmp_path, capsys, other, reason):
    for rank, events in enumerate((rank_events(100), other)):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps({"traceEvents": events}))
    together = analyse_traces([tmp_path]).together
    assert together.replay is None
    assert reason in together.notes[0]
    assert main(["trace", str(tmp_path)]) == 0
    assert "cannot be replayed together" in capsys.readouterr().out


def test_steps_and_order_tell_which_collectives_belong_together(tmp_path):
    for rank, events in enumerate((rank_events(100, collectives=3), rank_events(100, collectives=3, clock=77))):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps({"traceEvents": events}))
    replay = analyse_traces([tmp_path]).together.replay
    assert len(replay.matches.collectives) == 3
    assert [rank.last for rank in replay.ranks] == [3, 3]  # they come at the same moment


def test_the_page_the_json_and_the_timeline_tell_it(two_ranks, capsys, tmp_path):
    out = tmp_path / "out" / "timeline.json"
    out.parent.mkdir()
    assert main(["trace", str(two_ranks), "--full", "--trace-out", str(out)]) == 0
    page = capsys.readouterr().out
    assert "Replayed together: 1 collectives" in page
    assert "Critical path over ranks: begins on rank 1" in page
    events = json.loads(out.read_text())["traceEvents"]
    (begin,) = (e for e in events if e["ph"] == "s" and e["cat"] == "collective")
    (end,) = (e for e in events if e["ph"] == "f" and e["cat"] == "collective")
    kernels = {e["pid"]: e for e in events if e["ph"] == "X" and e["name"].startswith("nccl") and e["pid"] in (1, 6)}
    assert begin["pid"] == 6  # from rank 1, at its own start, ...
    assert begin["ts"] == kernels[6]["ts"]
    assert kernels[1]["ts"] < end["ts"] < kernels[1]["ts"] + kernels[1]["dur"]  # ... into rank 0's waiting kernel
    assert main(["trace", str(two_ranks), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)["together"]
    assert document["replay"]["collectives"][0]["transfer_us"] == pytest.approx(50)
    assert document["critical_path"]["segments"][0]["rank"] == 1


def test_frames_over_ranks(two_ranks):
    pytest.importorskip("polars")
    import traincast

    frames = traincast.trace(two_ranks, on="dgx1-v100").frames()
    assert frames["together"]["rank"].to_list() == [0, 1]
    assert frames["together"]["replay_error"].abs().max() < 1e-9
    assert "overheads" in frames["together"].columns
    assert frames["path_over_ranks"]["rank"][0] == 1


def test_eight_ranks_replay_together(shared_data):
    rows = replayed_ranks(shared_data)
    assert len(rows) == 9
    assert abs(rows[-1].error_percent) < 3
    assert all(abs(row.error_percent) < 5 for row in rows)
    assert all(abs(row.exposed_error_percent) < 10 for row in rows)


def test_the_replay_is_tabled(shared_data):
    slowest, every_rank, exposed = summarise_replayed_ranks("multi-gpu", shared_data)
    assert (slowest.n, every_rank.n, exposed.n) == (1, 8, 8)
    assert max(abs(every_rank.worst), every_rank.mape) < 5
    assert abs(exposed.worst) < 10


def test_eight_ranks_are_predicted_together(shared_data):
    folder = shared_data / "traces/param_dlrm_8xv100"
    report = analyse_traces([folder], TraceOptions(platform=load_platform("dgx1-v100")))
    prediction = report.together.prediction
    assert prediction.topology == "dgx1-v100"
    for steps in prediction.steps:
        (s,) = steps
        assert list(s.compute_shares()) == ["simulation", "kernels", "collectives", "overheads"]
        assert sum(s.compute_shares().values()) == pytest.approx(s.error)
        assert abs(s.error) < 0.12
    assert all(predicted < 300e-6 for _, _, _, predicted in prediction.transfers)
    assert report.together.path.segments[0].rank == 7  # it began last


def test_kernels_beside_a_collective_are_compared_with_the_same_alone(tmp_path):
    shapes = {"Input Dims": [[64]], "Input type": ["float"]}
    events = [launch(90, 2), kernel(90, 100, 300, stream=20, name="ncclKernel_AllReduce")]
    for number, (begin, length) in enumerate(((20, 10), (40, 10), (150, 15), (200, 25))):
        events += [event("cpu_op", "aten::mul", begin - 9, 8, **shapes), launch(number, begin - 8, 2)]
        events.append(kernel(number, begin, length, name="vectorized_elementwise_kernel"))
    found = compute_slowdowns(linked(tmp_path, step(*events)))
    assert list(found) == ["elementwise"]
    assert (found["elementwise"].count, found["elementwise"].ratio) == (2, pytest.approx(2.0))
    assert found["elementwise"].quartiles[1] == pytest.approx(2.0)


def test_equal_ranks_replay_together_as_each_does_alone(shared_data):
    """Nobody waits for anybody, and what crowded a collective out is not lost."""
    tied = link_trace(read_kineto(shared_data / "traces/hta_recsys_a100_rank3of8/kineto_rank3.json.gz"))
    calls, instructions, steps = find_collectives(tied), make_timeline_instructions(tied), compute_breakdown(tied)
    matches = match_collectives([tied, tied], [calls, calls])
    assert len(matches.collectives) == len(calls) == 60
    together = replay_ranks([tied, tied], [instructions, instructions], matches, [steps, steps])
    alone = simulate_replay(tied, instructions)
    for rank in together.ranks:
        assert rank.waited == 0.0
        assert [s.simulated for s in rank.replay.steps] == pytest.approx([s.simulated for s in alone.steps])
        assert all(simulated == pytest.approx(measured, rel=0.1) for measured, simulated in rank.exposed)
