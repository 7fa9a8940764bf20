"""The best layouts of a Transformer as a page for the terminal."""

from __future__ import annotations

from traincast.planner.parallelism.plan import Plan
from traincast.utils.display.text import format_table


def format_plan(plan: Plan) -> str:
    """The best layouts as a table, and what makes each slower than the first."""
    header = ["", "layout", "ms", "tokens/s/GPU", "MFU", "GB", "exposed ms"]
    header += ["$/1e9 tokens"] if plan.price is not None else []
    header += ["days"] if plan.tokens is not None else []
    rows = []
    for number in range(len(plan.best)):
        row = plan.row(number)
        cells = [
            str(number + 1), row["layout"], f"{row['iteration_ms']:,.0f}", f"{row['tokens_per_second_per_gpu']:,.0f}",
            f"{row['mfu']:.1%}", f"{row['memory_gb']:.0f}", f"{row['exposed_comm_ms']:,.0f}",
        ]  # fmt: skip
        cells += [f"{row['dollars_per_billion_tokens']:,.0f}"] if plan.price is not None else []
        cells += [f"{row['days']:,.1f}"] if plan.tokens is not None else []
        rows.append([*cells, row["slower_by"]])
    right = (0, *range(2, len(header)))
    return "\n".join([plan.headline(), "", format_table([*header, "slower by"], rows, right=right)])
