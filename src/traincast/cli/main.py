"""The command line: finds the verb, runs it, and is the one place that turns errors into exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module

from traincast.cli.options import in_options
from traincast.errors import TraincastError
from traincast.version import __version__

# verb -> what it is for; each lives in `commands/<verb>.py`, imported only when asked for
VERBS = {
    "predict": "how long one step of a model takes on a platform, and why",
    "shard": "where embedding tables go: the plan with the fastest step",
    "models": "the built-in models",
    "platforms": "the built-in GPUs and nodes",
    "capture": "a training step of your own model, without a GPU",
    "export": "a workload as PyTorch or Chakra execution trace",
    "fit": "rebuild the shipped profiles from measurements",
    "trace": "what measured traces say: steps, idle time and its reasons, host overheads, replay",
    "evaluate": "accuracy tables: predicted against measured",
}

OK, CHECK_FAILED, BAD_INPUT = 0, 1, 2

# what only some verbs need -> the extra that installs it
OPTIONAL = {"torch": "capture", "polars": "data", "scipy": "data", "threadpoolctl": "data"}


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = argparse.Namespace(options={})
    try:
        arguments = parse(argv)
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


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments of the verb that is asked for; `run` is what it does, `options` how its parameters are written."""
    parser = argparse.ArgumentParser(
        prog="traincast",
        description="How long will one training step of this model take on that hardware, and why?",
    )
    parser.add_argument("--version", action="version", version=f"traincast {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    asked = next((word for word in argv if not word.startswith("-")), None)
    for verb, summary in VERBS.items():
        if verb != asked:
            verbs.add_parser(verb, help=summary, add_help=False)
            continue
        module = import_module(f"traincast.cli.commands.{verb}")
        child = verbs.add_parser(
            verb,
            help=summary,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(child)
        child.add_argument("--json", action="store_true", help="one JSON document on stdout")
        options = {action.dest: action.option_strings[-1] for action in child._actions if action.option_strings}
        child.set_defaults(run=module.run, options=options)
    return parser.parse_args(argv)
