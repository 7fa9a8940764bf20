"""The command line: finds the verb, runs it, and is the one place that turns errors into exit codes."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path

from traincast.cli.options import in_options
from traincast.cli.verbs import BAD_INPUT, OK, parsers
from traincast.errors import TraincastError
from traincast.version import __version__

INTERNAL_ERROR, INTERRUPTED = 70, 130  # as sysexits.h and shells have them
_MOST_CHARACTERS = 1500  # of a message: a screenful; the longest honest one lists the fields of a platform

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
        return _say(in_options(str(error), arguments.options), BAD_INPUT)
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            return _ours(error)
        return _say(f"this needs {error.name}: pip install 'traincast[{OPTIONAL[error.name]}]'", BAD_INPUT)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except OSError as error:  # a file that cannot be read or written; after BrokenPipeError, which is one too
        return _say(f"'{error.filename}': {error.strerror}" if error.filename else str(error), BAD_INPUT)
    except MemoryError:
        return _say("not enough memory for this input; give a smaller one", BAD_INPUT)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except Exception as error:
        return _ours(error)


def _ours(error: Exception) -> int:
    """A mistake of ours in one line that names its place, to be reported; with TRAINCAST_DEBUG set, the whole of it."""
    if os.environ.get("TRAINCAST_DEBUG"):
        raise error
    place = traceback.extract_tb(error.__traceback__)[-1]
    what = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}: {error}"
    return _say(
        f"internal error, please report it with the command and its input: {what} (version {__version__})",
        INTERNAL_ERROR,
    )


def _say(message: str, code: int) -> int:
    """One printable line on stderr, however long and strange the names in it; returns the exit code."""
    if not message.isprintable():
        message = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
    if len(message) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2
        message = f"{message[:half]} ... {message[-half:]}"
    print(f"traincast: {message}", file=sys.stderr)
    return code


def _parse(argv: list[str]) -> argparse.Namespace:
    """The arguments of the verb that is asked for; `run` is what it does, `options` how its parameters are written."""
    parser, _ = parsers([word for word in argv if not word.startswith("-")][:1])
    return parser.parse_args(argv)
