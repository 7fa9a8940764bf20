"""What scripts that read the measured tables have in common: the option that names their folder, and one line for what
is wrong."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from traincast.utils.errors import TraincastError


def run_on_data(work: Callable[[Path], None], description: str | None) -> NoReturn:
    """Does the work of a script on the folder that `--data` names, and ends it."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, required=True)
    try:
        work(parser.parse_args().data)
    except TraincastError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    sys.exit(0)
