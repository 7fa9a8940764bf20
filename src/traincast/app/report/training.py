"""A predicted step of a large Transformer as a page for the terminal."""

from __future__ import annotations

from traincast.planner.parallelism.plan import Plan
from traincast.simulator.parallelism.result import TrainingPrediction
from traincast.simulator.scenario.settings import settings_text
from traincast.utils.display.text import bar, milliseconds, table


def training_text(p: TrainingPrediction) -> str:
    """The answer as a page: the number, what the step is made of, memory, and what was assumed."""
    rows = [
        (name, milliseconds(seconds), f"{seconds / p.iteration:6.1%}", bar(seconds / p.iteration))
        for name, seconds in p.split()
    ]
    memory = ", ".join(f"{kind} {size / 1e9:.1f}" for kind, size in p.memory.items() if size >= 5e7)
    held = p.platform.device.memory_bytes / 1e9
    lines = [
        p.headline(), "", table(("the slowest stage", "ms", "of step", ""), rows, right=(1, 2)), "",
        f"memory of the fullest rank: {sum(p.memory.values()) / 1e9:.1f} GB allocated ({memory}); with context and "
        f"buffers {p.needed / 1e9:.1f} of {held:.0f} GB",
        f"{p.parts.unknown / p.iteration:.0%} of the step is in kernels outside of what was measured on this GPU; "
        f"host profile: {p.host_profile}",
        f"settings: {settings_text(p.scenario)}",
    ]  # fmt: skip
    return "\n".join([*lines, *(f"warning: {warning}" for warning in p.warnings)])


def plan_text(plan: Plan) -> str:
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
    return "\n".join([plan.headline(), "", table([*header, "slower by"], rows, right=right)])
