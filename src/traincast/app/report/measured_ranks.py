"""Several measured ranks together, as text."""

from __future__ import annotations

from collections.abc import Sequence

from traincast.app.report.measured_profile import format_shared_communication
from traincast.app.report.measured_verdict import format_gains
from traincast.traces.replay.path import RanksPath
from traincast.traces.replay.results import TogetherReport
from traincast.traces.replay.together import RanksReplay, TracedRanksPrediction
from traincast.utils.display.text import count_of, format_bar, format_milliseconds, format_table, shorten_name

_SHORT = 5  # rows on the first screen
_MOST_RANKS = 32


def format_together(together: TogetherReport, top: int, *, full: bool = True) -> str:
    """The figures over ranks, their replay together, the path over them, and their prediction; unless `full` ranks in a
    line each and the path."""
    figures, numbers = together.breakdown, together.numbers
    parts = [
        f"All {len(numbers)} ranks: median step {format_milliseconds(figures.step)} ms, "
        f"exposed communication {figures.eg_comm:.1%}, imbalance {figures.eg_imbalance:.1%}",
        *(f"  note: {note}" for note in together.notes),
    ]
    if not full:
        parts += ["", _format_rank_lines(numbers, together.replay)] if together.replay else []
        return "\n".join([*parts, *(["", _format_path(together.path, _SHORT)] if together.path else [])])
    if together.exchanges:
        parts += [
            "",
            "Collectives over ranks (means of one call)",
            format_shared_communication(together.exchanges, top),
        ]
    if together.replay:
        parts += ["", _format_replay(numbers, together.replay)]
    if together.path:
        parts += ["", _format_path(together.path, top)]
    if together.prediction:
        parts += ["", _format_prediction(numbers, together.prediction)]
    return "\n".join(parts)


def _format_rank_lines(numbers: Sequence[int], replay: RanksReplay) -> str:
    """A line per rank: its mean step, exposed communication, how long it waited, and how often it came last."""
    rows = []
    for number, rank in list(zip(numbers, replay.ranks, strict=True))[:_MOST_RANKS]:
        count = len(rank.replay.steps) or 1
        step = sum(s.measured for s in rank.replay.steps) / count
        exposed = sum(measured for measured, _ in rank.exposed) / count
        times = (format_milliseconds(seconds) for seconds in (step, exposed, rank.waited))
        rows.append((str(number), *times, count_of(rank.last, "time")))
    header = ("rank", "ms per step", "exposed comm ms", "waited ms", "came last")
    return format_table(header, rows, right=range(5))


def _format_replay(numbers: Sequence[int], replay: RanksReplay) -> str:
    header = ("rank", "step", "ms", "replayed ms", "error", "exposed comm ms", "replayed ms", "waited ms", "came last")
    rows = [
        (
            str(number),
            str(s.number),
            format_milliseconds(s.measured),
            format_milliseconds(s.walked),
            f"{s.error:+.2%}",
            format_milliseconds(measured),
            format_milliseconds(simulated),
            format_milliseconds(rank.waited) if not i else "",
            count_of(rank.last, "time") if not i else "",
        )
        for number, rank in zip(numbers, replay.ranks, strict=True)
        for i, (s, (measured, simulated)) in enumerate(zip(rank.replay.steps, rank.exposed, strict=True))
    ]
    measured, simulated = replay.slowest
    return "\n".join(
        [
            f"Replayed together: {len(replay.matches.collectives)} collectives end when the last rank has come and the "
            f"transfer is done (clocks agree to {1e6 * replay.matches.spread:.1f} us)",
            format_table(header, rows, right=range(9)),
            f"  slowest rank: {format_milliseconds(measured)} ms measured, {format_milliseconds(simulated)} replayed "
            f"({simulated / measured - 1:+.2%})",
        ]
    )


def _format_path(path: RanksPath, top: int) -> str:
    begin = f"rank {path.segments[0].rank}" if path.segments else "no rank"
    lines = [
        f"Critical path over ranks: begins on {begin}, {format_milliseconds(path.skew)} ms after the first rank began",
        *(f"  {f'rank {rank}':<48} {share:>6.1%}  {format_bar(share)}" for rank, share in path.by_rank.items()),
        "  of which under these ops:",
    ]
    places = list(path.by_place.items())[:top]
    names = {place: f"rank {place[0]}, {place[1] or 'between ops'}" for place, _ in places}
    lines += [f"    {shorten_name(names[place], 46):<46} {share:>6.1%}" for place, share in places]
    return "\n".join([
        *lines, "", "Twice as fast, the run over all ranks is shorter by", *format_gains(path.faster, width=48),
    ])  # fmt: skip


def _format_prediction(numbers: Sequence[int], prediction: TracedRanksPrediction) -> str:
    header = (
        "rank", "step", "measured ms", "predicted ms", prediction.difference, "+ walk", "+ kernels", "+ collectives",
        "+ overheads", "exposed comm ms", "predicted ms",
    )  # fmt: skip
    rows = [
        (
            str(number), str(s.number), format_milliseconds(s.measured), format_milliseconds(s.full), f"{s.error:+.1%}",
            *(f"{share:+.1%}" for share in s.compute_shares().values()),
            format_milliseconds(s.exposed_measured), format_milliseconds(s.exposed),
        )
        for number, steps in zip(numbers, prediction.steps, strict=True)
        for s in steps
    ]  # fmt: skip
    known = f"GMAE {prediction.gmae:.1%} of" if prediction.difference == "error" else "a forecast of"
    return "\n".join([
        f"Predicted together (collectives on {prediction.topology}; ranks begin when they did): "
        f"{known} {len(rows)} steps",
        format_table(header, rows, right=range(len(header))),
    ])  # fmt: skip
