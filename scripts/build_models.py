"""Regenerates the data files of the built-in models by capturing them.

    python scripts/build_models.py [--missing] [NAMES]

With --missing, files that are there are left as they are.
"""

from __future__ import annotations

import sys
import time

from traincast.utils.errors import TraincastError
from traincast_evaluation.zoo.build.files import build_model, write_index
from traincast_evaluation.zoo.build.recipes import RECIPES


def main(arguments: list[str]) -> int:
    """Builds the models named (all when none is), then the index; prints one line per file."""
    only_missing = "--missing" in arguments
    names = [word for word in arguments if word != "--missing"]
    for name in names or list(RECIPES):
        if name not in RECIPES:
            print(f"unknown model '{name}'; known: {', '.join(RECIPES)}", file=sys.stderr)
            return 2
        for path, ops in _timed(name, only_missing):
            print(f"{path}  {ops} ops")
    write_index()
    return 0


def _timed(name: str, only_missing: bool) -> list[tuple[str, int]]:
    start = time.perf_counter()
    built = [(str(path), ops) for path, ops in build_model(RECIPES[name], only_missing=only_missing)]
    print(f"{name}: {len(built)} files in {time.perf_counter() - start:.1f} s")
    return built


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except TraincastError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
