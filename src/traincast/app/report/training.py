"""The best layouts of a Transformer as a page for the terminal."""

from __future__ import annotations

from traincast.planner.parallelism.plan import Plan
from traincast.simulator.prediction.verdict import state_verdict
from traincast.utils.display.text import format_dollars, format_duration, format_table


def format_plan(plan: Plan) -> str:
    """The best layouts as a table, and what makes each slower than the first."""
    header = ["", "layout", "ms", "tokens/s/GPU", "MFU", "GB", "exposed ms"]
    header += ["$ per billion tokens"] if plan.price is not None else []
    header += ["days"] if plan.tokens is not None else []
    rows = []
    for number in range(len(plan.best)):
        row = plan.row(number)
        cells = [
            str(number + 1), row["layout"], f"{row['iteration_ms']:,.0f}", f"{row['tokens_per_second_per_gpu']:,.0f}",
            f"{row['mfu']:.1%}", f"{row['memory_gb']:.0f}", f"{row['exposed_comm_ms']:,.0f}",
        ]  # fmt: skip
        cells += [format_dollars(row["dollars_per_billion_tokens"])] if plan.price is not None else []
        cells += [f"{row['days']:,.1f}"] if plan.tokens is not None else []
        rows.append([*cells, row["slower_by"]])
    right = (0, *range(2, len(header)))
    table = format_table([*header, "slower by"], rows, right=right)
    return "\n".join([*_state_plan(plan), "", table, "", "to predict the first:", f"  {plan.commands[0]}"])


def _state_plan(plan: Plan) -> list[str]:
    """The best layout, how long, whether it fits, what it costs, what it rests on; then what was searched."""
    best, row = plan.best[0], plan.row(0)
    searched, _ = plan.headline().split("\n")
    rate = f"{row['tokens_per_second_per_gpu']:,.0f} tokens/s per GPU, MFU {row['mfu']:.1%}"
    length = "" if row["days"] is None else f"{format_duration(86400 * row['days'])} in all"
    dollars = "" if row["dollars"] is None else format_dollars(row["dollars"])
    whole = " and ".join(part for part in (length, dollars) if part)
    return [
        f"Best: {row['layout']}: {state_verdict(best)[0]}",
        f"{rate}{f'; {whole}' if whole else ''}. {best.trust.sentence}",
        searched,
    ]
