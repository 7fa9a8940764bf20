"""One drawn scenario held to the laws, and many of them into a log that a run goes on from."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from traincast.simulator.prediction.result import Prediction
from traincast.simulator.scenario.resolved import format_predict_command
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError
from traincast_evaluation.laws.answers import ROOFS, check_answer
from traincast_evaluation.laws.drawing import draw_scenario
from traincast_evaluation.laws.exceptions import find_exception
from traincast_evaluation.laws.relations import Side, check_one_gpu, list_pairs, predict_side

PAIRS = 3
"""Pairs that a drawn scenario is tried in."""


@dataclass
class Violation:
    """A law that an answer broke: the command that shows it, by which factor, and the physics where it is known."""

    law: str
    command: str
    shown: str
    factor: float
    excused: str = ""


@dataclass
class Trial:
    """What came of one seed: scenarios that were answered, tries of each law, and what was broken."""

    seed: int
    answered: int = 0
    rejected: int = 0
    tried: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "tried": dict(self.tried)}


def run_trial(seed: int) -> Trial:
    """One scenario, alone and in pairs; what is rejected by name is no answer."""
    rng, trial, start = random.Random(f"laws {seed}"), Trial(seed), time.process_time()
    scenario = draw_scenario(rng)
    try:
        result = _ask(scenario, scenario, trial)
    except TraincastError:
        trial.rejected += 1
    else:
        _hold_one_gpu(scenario, result, trial)
        _hold_pairs(scenario, result, rng, trial)
    trial.seconds = round(time.process_time() - start, 3)
    return trial


def _hold_one_gpu(scenario: Scenario, result: Prediction, trial: Trial) -> None:
    if trial.seed % 4:  # two more predictions: not of every scenario
        return
    trial.tried["one GPU"] += 1
    try:
        for law, shown, factor in check_one_gpu(scenario, result):
            _note(trial, law, scenario, shown, factor)
    except TraincastError:
        trial.rejected += 1


def _hold_pairs(scenario: Scenario, result: Prediction, rng: random.Random, trial: Trial) -> None:
    makers = list_pairs(scenario, rng)
    rng.shuffle(makers)
    done = 0
    for make in makers:
        if done == PAIRS:
            break
        try:
            pair = make()
            if pair is None:
                continue
            first = result if pair.first == scenario else _ask(pair.first, scenario, trial)
            second = _ask(pair.second, scenario, trial, pair.law)
        except TraincastError:
            trial.rejected += 1
            continue
        done += 1
        trial.tried[pair.law] += 1
        for law, shown, factor in pair.judge(first, second):
            _note(trial, law, pair.second if isinstance(pair.second, Scenario) else scenario, shown, factor)


def _ask(side: Side, scenario: Scenario, trial: Trial, law: str = "") -> Prediction:
    """An answer, held to what every answer is."""
    result = predict_side(side)
    trial.answered += 1
    trial.tried["every answer"] += 1
    for broken, shown, factor in check_answer(result):
        if law.startswith("speed:") and broken in ROOFS:  # somebody has written a faster kernel
            continue
        _note(trial, broken, side if isinstance(side, Scenario) else scenario, shown, factor)
    return result


def _note(trial: Trial, law: str, scenario: Scenario, shown: str, factor: float) -> None:
    known = find_exception(law, scenario, factor)
    command = format_predict_command(scenario)
    trial.violations.append(Violation(law, command, shown, round(min(factor, 1e6), 6), known.physics if known else ""))


def read_trials(log: Path) -> dict[int, dict[str, Any]]:
    """What a log holds, by seed."""
    if not log.exists():
        return {}
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    return {row["seed"]: row for row in rows}
