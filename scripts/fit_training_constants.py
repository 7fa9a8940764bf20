"""Fits the shared constants of training steps anew: `python scripts/fit_training_constants.py --data DIR`.

Half of the published steps decide, told by a hash of their configurations; both halves are printed before and after.
`--write` puts the numbers into src/traincast/costs/data/in_step.toml. Needed whenever a kernel or
collective model changes. `--left-out` prints instead what every board and source err by when no step of theirs takes
part. The same data and models give the same file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from traincast.costs.in_step import SHIPPED, InStep, load_shipped_tables
from traincast.utils.errors import TraincastError
from traincast.utils.files.writing import write_bytes
from traincast_evaluation.suites.cases import Case, LeftOut
from traincast_evaluation.suites.llm import llm_cases
from traincast_evaluation.suites.llm_fit import (
    ConstantsFit,
    LinearFit,
    compute_half_errors,
    list_predictable,
    name_board,
    name_source,
)

FILE = Path(__file__).parent.parent / "src" / "traincast" / "costs" / "data" / "in_step.toml"
HEADER = "# Written by scripts/fit_training_constants.py; what each number is stands in costs/in_step.py.\n"


def table_text(constants: InStep, rows: int) -> str:
    """The file of these constants, `rows` steps fitted on; which were measured, and from what, stays as it was."""
    shipped, numbers = load_shipped_tables(), constants.by_name()
    lines = [HEADER, "[provenance]", f"rows = {rows}"]
    lines += [f'{name} = "{text}"' for name, text in shipped["provenance"].items() if name != "rows"]
    for part in ("fitted", "measured"):
        lines += ["", f"[{part}]"]
        lines += [f"{_key(name)} = {float(numbers[name])!r}" for name in shipped[part]]
    lines += ["", "[carried]", *(f'"{name}" = "{source}"' for name, source in shipped["carried"].items())]
    lines += ["", "[watts_per_tflops]", *(f"{arch} = {watts!r}" for arch, watts in shipped["watts_per_tflops"].items())]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return f'"{name}"' if " " in name else name


def print_left_out(cases: list[Case]) -> None:
    """A row for every board and every source with as many steps as tell anything."""
    fit = LinearFit(cases, SHIPPED, tuple(load_shipped_tables()["fitted"]))
    print(f"{'MAPE % of the closed form':44} {'n':>4} {'shipped':>8} {'left out':>8} {'bias':>6}  told by it alone")
    for kind, name in (("board", name_board), ("source", name_source)):
        for group in sorted({name(case) for case in cases}):
            row = fit.leave_out(f"{kind} {group}", [name(case) == group for case in cases])
            own = ", ".join(row.own)
            print(f"{row.group:44} {row.steps:4} {row.shipped:8.1f} {row.left_out:8.1f} {row.bias:+6.1f}  {own}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of measurements")
    parser.add_argument("--rounds", type=int, default=3, help="turns through all numbers (default 3)")
    parser.add_argument("--write", action="store_true", help="put the numbers into the shipped file")
    parser.add_argument("--left-out", action="store_true", help="boards and sources, each left out of the fit")
    args = parser.parse_args()
    try:
        cases = [case for case in llm_cases(args.data) if not isinstance(case, LeftOut)]
        cases = list_predictable(cases, SHIPPED)
        if args.left_out:
            print_left_out(cases)
            return 0
        fit = ConstantsFit(cases, SHIPPED, tuple(load_shipped_tables()["fitted"]))
        after = fit.run(args.rounds, progress=print)
    except TraincastError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, value in after.by_name().items():
        if value != SHIPPED.by_name()[name]:
            print(f"{name:22} {SHIPPED.by_name()[name]:9.4g} -> {value:.4g}")
    print(f"{'MAPE %':34} {'fitted half':>16} {'held-out half':>16}")
    for row in compute_half_errors(cases, SHIPPED, after):
        print(
            f"{row.source:34} {row.fitted_before:6.1f} -> {row.fitted_after:5.1f} "
            f"{row.held_before:8.1f} -> {row.held_after:5.1f}"
        )
    if args.write:
        write_bytes(FILE, table_text(after, len(fit.cases)).encode())
        print(f"wrote {FILE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
