"""The command line: finds the verb, runs it, and is the one place that turns errors into exit codes."""

from __future__ import annotations

import argparse
import os
import sys

from traincast.cli.options import in_options
from traincast.cli.verbs import BAD_INPUT, OK, parsers
from traincast.errors import TraincastError

# what only some verbs need -> the extra that installs it
OPTIONAL = {"torch": "capture", "polars": "data", "scipy": "data", "threadpoolctl": "data"}


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = argparse.Namespace(options={})
    try:
        arguments = _parse(argv)
        return int(arguments.run(arguments))
    except TraincastError as error:
        print(f"traincast: {in_options(str(error), arguments.options)}", file=sys.stderr)
        return BAD_INPUT
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        extra = OPTIONAL[error.name]
        print(f"traincast: this needs {error.name}: pip install 'traincast[{extra}]'", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except OSError as error:  # a file that cannot be read or written; after BrokenPipeError, which is one too
        print(f"traincast: '{error.filename}': {error.strerror}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("traincast: interrupted", file=sys.stderr)
        return 130


def _parse(argv: list[str]) -> argparse.Namespace:
    """The arguments of the verb that is asked for; `run` is what it does, `options` how its parameters are written."""
    parser, _ = parsers([word for word in argv if not word.startswith("-")][:1])
    return parser.parse_args(argv)
