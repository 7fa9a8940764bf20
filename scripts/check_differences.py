"""How often measured changes are inside the 90 % intervals of predicted ones: pairs of measured steps on one GPU.

TRAINCAST_DATA=... .venv/bin/python scripts/check_differences.py
"""

from __future__ import annotations

import math
import os
import sys
from collections import defaultdict
from itertools import combinations
from pathlib import Path

import numpy as np

from traincast.planner.what_if.result import compute_difference
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.resolved import resolve
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.metrics import Z90
from traincast_evaluation.suites.cases import Case
from traincast_evaluation.suites.single_gpu import dlrm_cases, transformer_cases


def main(folder: str) -> None:
    """Prints, by what differs in a pair, how many there are, the share inside, and the errors of the ratio."""
    for name, cases in (("DLRM", dlrm_cases(Path(folder))), ("Transformers", transformer_cases(Path(folder)))):
        known = []
        for case in cases:
            if isinstance(case, Case) and isinstance(case.question, Scenario) and not case.question.compiled:
                step = resolve(case.question)
                known.append((case, step, predict(step)))
        errors: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for (one, s1, a1), (two, s2, a2) in combinations(known, 2):
            same_model, same_device = one.question.workload == two.question.workload, one.group == two.group
            if one.question.mode != two.question.mode:
                continue
            kind = "batch or length" if same_model and same_device else "device" if one.name == two.name else ""
            if kind:
                change = compute_difference((s1, a1), (s2, a2))
                errors[kind].append(
                    (math.log(change.ratio) - math.log(two.measured_ms / one.measured_ms), change.sigma)
                )
        for kind, rows in errors.items():
            error, sigma = np.array(rows).T
            inside = float(np.mean(np.abs(error) <= Z90 * sigma))
            middle, width = 100 * float(np.median(np.abs(error))), 100 * Z90 * float(sigma.mean())
            shares = f"{len(rows)} pairs, {inside:.0%} inside"
            print(f"{name}, {kind} differs: {shares}, median |error| {middle:.1f} %, mean half-width {width:.1f} %")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else os.environ["TRAINCAST_DATA"])
