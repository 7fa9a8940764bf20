"""Several measured ranks together, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from traincast.display.text import bar, milliseconds, table
from traincast.replay.analysis import TogetherReport
from traincast.replay.path_together import RanksPath
from traincast.replay.predicted_together import RanksPrediction
from traincast.replay.together import RanksReplay
from traincast.report.attribution import gmae

_TOP = 8
_LEAST_GAIN = 0.001
_SHARES = ("walk", "kernels", "collectives", "overheads")


def together_text(numbers: Sequence[int], together: TogetherReport) -> str:
    """The figures over ranks, their replay together, the path over them, and their prediction."""
    figures = together.breakdown
    parts = [
        f"All {len(numbers)} ranks: median step {milliseconds(figures.step)} ms, "
        f"eg_comm {figures.eg_comm:.1%}, eg_imbalance {figures.eg_imbalance:.1%}",
        *(f"  note: {note}" for note in together.notes),
    ]
    if together.replay:
        parts += ["", _replay_text(numbers, together.replay)]
    if together.path:
        parts += ["", _path_text(together.path)]
    if together.prediction:
        parts += ["", _prediction_text(numbers, together.prediction)]
    return "\n".join(parts)


def _replay_text(numbers: Sequence[int], replay: RanksReplay) -> str:
    header = ("rank", "step", "ms", "replayed ms", "error", "exposed comm ms", "replayed ms", "waited ms", "came last")
    rows = [
        (
            str(number), str(s.number), milliseconds(s.measured), milliseconds(s.walked), f"{s.error:+.2%}",
            milliseconds(measured), milliseconds(walked), milliseconds(rank.waited) if not i else "",
            f"{rank.last} times" if not i else "",
        )
        for number, rank in zip(numbers, replay.ranks, strict=True)
        for i, (s, (measured, walked)) in enumerate(zip(rank.replay.steps, rank.exposed, strict=True))
    ]  # fmt: skip
    measured, walked = replay.slowest
    return "\n".join([
        f"Replayed together: {len(replay.matches.collectives)} collectives end when the last rank has come and the "
        f"transfer is done (clocks agree to {1e6 * replay.matches.spread:.1f} us)",
        table(header, rows, right=range(9)),
        f"  slowest rank: {milliseconds(measured)} ms measured, {milliseconds(walked)} replayed "
        f"({walked / measured - 1:+.2%})",
    ])  # fmt: skip


def _path_text(path: RanksPath) -> str:
    begin = f"rank {path.segments[0].rank}" if path.segments else "no rank"
    lines = [
        f"Critical path over ranks: begins on {begin}, {milliseconds(path.skew)} ms after the first rank began",
        *(f"  {f'rank {rank}':<48} {share:>6.1%}  {bar(share)}" for rank, share in path.by_rank.items()),
        "  of which under these ops:",
    ]
    places = list(path.by_place.items())[:_TOP]
    names = {place: f"rank {place[0]}, {place[1] or 'between ops'}" for place, _ in places}
    lines += [f"    {names[place][:46]:<46} {share:>6.1%}" for place, share in places]
    lines += ["", "Twice as fast, the run over all ranks is shorter by"]
    lines += [
        f"  {name[:48]:<48} {gain:>6.1%}  {bar(gain)}" for name, gain in path.faster.items() if gain >= _LEAST_GAIN
    ]
    nothing = [name for name, gain in path.faster.items() if gain < _LEAST_GAIN]
    return "\n".join([*lines, *([f"  nothing by: {', '.join(nothing)}"] if nothing else [])])


def _prediction_text(numbers: Sequence[int], prediction: RanksPrediction) -> str:
    errors = [step.error for steps in prediction.steps for step in steps]
    header = (
        "rank", "step", "measured ms", "predicted ms", "error", *(f"+ {name}" for name in _SHARES),
        "exposed comm ms", "predicted ms",
    )  # fmt: skip
    rows = [
        (
            str(number), str(s.number), milliseconds(s.measured), milliseconds(s.full), f"{s.error:+.1%}",
            *(f"{s.share(name):+.1%}" for name in _SHARES), milliseconds(s.exposed_measured), milliseconds(s.exposed),
        )
        for number, steps in zip(numbers, prediction.steps, strict=True)
        for s in steps
    ]  # fmt: skip
    return "\n".join([
        f"Predicted together (collectives on {prediction.topology}; ranks begin when they did): "
        f"GMAE {gmae(errors):.1%} of {len(errors)} steps",
        table(header, rows, right=range(len(header))),
    ])  # fmt: skip


def together_json(numbers: Sequence[int], together: TogetherReport) -> dict[str, Any]:
    """Everything over ranks, in milliseconds and microseconds as the names say."""
    figures = together.breakdown
    return {
        "iteration_ms": 1e3 * figures.step,
        "eg_comm": figures.eg_comm,
        "eg_imbalance": figures.eg_imbalance,
        "notes": list(together.notes),
        "replay": together.replay and _replay_json(numbers, together.replay),
        "critical_path": together.path and _path_json(together.path),
        "prediction": together.prediction and _prediction_json(numbers, together.prediction),
    }


def _replay_json(numbers: Sequence[int], replay: RanksReplay) -> dict[str, Any]:
    measured, walked = replay.slowest
    return {
        "slowest_measured_ms": 1e3 * measured,
        "slowest_replayed_ms": 1e3 * walked,
        "clock_spread_us": 1e6 * replay.matches.spread,
        "ranks": [
            {
                "rank": number, "clock_offset_us": 1e-3 * float(offset), "waited_ms": 1e3 * rank.waited,
                "came_last": rank.last, "begins_ms": 1e3 * float(begin),
                "steps": [
                    {
                        "number": s.number, "iteration_ms": 1e3 * s.measured, "replayed_ms": 1e3 * s.walked,
                        "replay_error": s.error, "exposed_comm_ms": 1e3 * m, "replayed_exposed_comm_ms": 1e3 * w,
                    }
                    for s, (m, w) in zip(rank.replay.steps, rank.exposed, strict=True)
                ],
            }
            for number, rank, offset, begin in zip(
                numbers, replay.ranks, replay.matches.offset, replay.walked.schedule.begin, strict=True
            )
        ],
        "collectives": [
            {
                "kind": match.kind, "group": match.calls[0].group, "ranks": [numbers[m] for m in match.members],
                "message_bytes": max(call.message_bytes for call in match.calls), "transfer_us": 1e6 * match.seconds,
                "latency_us": [1e6 * call.seconds for call in match.calls],
            }
            for match in replay.matches.collectives
        ],
    }  # fmt: skip


def _path_json(path: RanksPath) -> dict[str, Any]:
    return {
        "skew_ms": 1e3 * path.skew,
        "share_by_rank": {str(rank): share for rank, share in path.by_rank.items()},
        "share_by_what": path.by_what,
        "share_by_rank_and_op": [{"rank": r, "op": op, "share": share} for (r, op), share in path.by_place.items()],
        "twice_as_fast_saves": path.faster,
        "segments": [
            {"rank": s.rank, "what": s.what, "op": s.op, "name": s.name, "start_us": round(1e6 * s.start, 3),
             "length_us": round(1e6 * (s.end - s.start), 3)}
            for s in path.segments
        ],
    }  # fmt: skip


def _prediction_json(numbers: Sequence[int], prediction: RanksPrediction) -> dict[str, Any]:
    return {
        "topology": prediction.topology,
        "gmae": gmae([step.error for steps in prediction.steps for step in steps]),
        "steps": [
            {
                "rank": number, "number": s.number, "measured_ms": 1e3 * s.measured, "predicted_ms": 1e3 * s.full,
                "error": s.error, "shares": {name: s.share(name) for name in _SHARES},
                "exposed_comm_ms": 1e3 * s.exposed_measured, "predicted_exposed_comm_ms": 1e3 * s.exposed,
            }
            for number, steps in zip(numbers, prediction.steps, strict=True)
            for s in steps
        ],
        "transfers": [
            {"kind": kind, "message_bytes": size, "measured_us": 1e6 * measured, "predicted_us": 1e6 * predicted}
            for kind, size, measured, predicted in prediction.transfers
        ],
    }  # fmt: skip
