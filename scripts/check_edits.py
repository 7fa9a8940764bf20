"""Every edit on every built-in model, published program and described Transformer: a sound step, or a reason. Takes
minutes; `--part 2/4` is the second of four parts of the models.

.venv/bin/python scripts/check_edits.py [--part N/OF] [MODEL ...]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.planner.what_if.matrix import check_edit, models, texts


def main(wanted: list[str], part: str) -> int:
    """Prints a line a model: how many edits apply, and how many say why not; exit code 1 when a step is not sound."""
    done = applied = wrong = 0
    number, of = map(int, part.split("/"))
    for model in wanted or models()[number - 1 :: of]:
        refused = {}
        for text in texts(model):
            done += 1
            try:
                reason = check_edit(model, text)
            except Exception as error:
                wrong += 1
                print(f"WRONG {model} {text}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            if reason:
                refused[text] = reason
            else:
                applied += 1
        print(f"{model}: {len(texts(model)) - len(refused)} of {len(texts(model))} edits apply", flush=True)
        if wanted:
            for text, reason in refused.items():
                print(f"  {text}: {reason}")
    print(f"{done} pairs: {applied} apply, {done - applied - wrong} say why not, {wrong} are wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--part", default="1/1", metavar="N/OF")
    given = parser.parse_args()
    sys.exit(main(given.models, given.part))
