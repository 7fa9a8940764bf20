"""Arguments that several commands read the same way: options from the fields of a scenario, edits, money."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from traincast.simulator.scenario.resolved import read_scenario
from traincast.simulator.scenario.scenario import GROUPS, FieldInfo, list_scenario_fields
from traincast.utils.errors import TraincastError

_MOST_DIGITS = 9


def parse_path(text: str) -> Path:
    """The path that an argument names. An empty one is rejected, which Python would take for the current folder."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("a name that no file can have; give a path") from None
    if not text.strip():
        raise argparse.ArgumentTypeError(f"'{text}' is no path; give one")
    return Path(text)


def parse_price(price: str, on: str | None) -> float:
    """Dollars of one GPU for an hour: the number given, or that of `list` for the GPU that is asked about."""
    with suppress(ValueError):
        return float(price.removeprefix("$"))
    from traincast.hardware.platform import load_platform
    from traincast.planner.what_if.money import find_one_price

    platform = None if on is None or on == "here" else load_platform(on)
    return find_one_price(price, platform.key if platform else "", platform.device.key if platform else "")


def parse_whole_numbers(option: str, text: str) -> list[int]:
    """The numbers of `1,2,4`; `option` is named when it is something else.

    >>> parse_whole_numbers("--ranks", "1,2,4")
    [1, 2, 4]
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) <= _MOST_DIGITS for part in parts):
        raise TraincastError(f"{option} {text}: give an integer, or several with commas between: 1,2,4,8")
    return [int(part) for part in parts]


def parse_count(text: str) -> float:
    """A number of samples or tokens: `4e9`, `4B`, `15T`, `300M`.

    >>> parse_count("15T")
    15000000000000.0
    """
    scale = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}.get(text[-1:].lower(), 1.0)
    number = float(text[:-1] if scale != 1.0 else text)  # what is no number is rejected by argparse
    return number * scale


def _parse_processes(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS and int(text)):
        raise argparse.ArgumentTypeError(f"'{text}' is no number of processes; give 1 or more")
    return int(text)


def add_processes_option(parser: argparse.ArgumentParser) -> None:
    """Where many independent tasks run."""
    parser.add_argument(
        "--processes", type=_parse_processes, metavar="N", dest="processes", help="default: one per core"
    )


PRICES_HELP = "dollars of a GPU and hour: 2.5, h100=2.5,..., or 'list'"


def add_money_arguments(parser: argparse.ArgumentParser) -> None:
    """What a step costs."""
    parser.add_argument("--price", metavar="PRICES", help=PRICES_HELP)
    parser.add_argument("--samples", type=parse_count, metavar="N", help="samples of the whole run, such as 4B")
    parser.add_argument("--tokens", type=parse_count, metavar="N", help="tokens of the whole run, such as 15T")
    parser.add_argument("--power-watts", type=float, dest="power_limit_w", help=argparse.SUPPRESS)  # its old name


def add_edit_arguments(parser: argparse.ArgumentParser) -> None:
    """Which edits are made."""
    parser.add_argument("--set", action="append", default=[], metavar="EDIT=VALUE", dest="settings",
                        help="an edit with a value: batch-size=4096; may be given several times")  # fmt: skip
    parser.add_argument("--apply", action="append", default=[], metavar="EDIT",
                        help="an edit without one: cuda-graph; may be given several times")  # fmt: skip


def read_edits(args: argparse.Namespace) -> list[str]:
    """The edits that were given, each as one text."""
    for text in args.settings:
        if "=" not in text:
            raise TraincastError(f"--set {text}: write EDIT=VALUE, or --apply {text} for an edit without a value")
    return [*args.settings, *args.apply]


def read_money_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keywords that say what a step costs."""
    names = ("price", "samples", "tokens")
    return {name: getattr(args, name) for name in names}


OPTIONS = tuple(name for name in list_scenario_fields() if name not in ("workload", "on"))
"""Fields that are options of every command about a step."""
VARIANT = ("batch_size", "seq_len", "dtype", "mode", "optimizer", "attention", "embedding")
"""Fields that say which step of a model it is, wherever it runs."""
WORKLOAD_HELP = "a model ('traincast models'), a .tc, .yaml or config.json file, or FILE.py:FUNCTION"
PLATFORM_HELP = "a GPU or node ('traincast platforms'), a description (.toml), or 'here'"
_METAVARS = {"integer": "N", "number": "X", "text": "TEXT"}
_NAMED = {"host": "CPU", "costs": "FILE", "plan": "FILE", "dense": "FILE", "stage_layers": "N,N...",
          "graph_modules": "NAME,...", "overlap": "KIND,KIND..."}  # fmt: skip


def add_scenario_options(
    parser: argparse.ArgumentParser, names: Iterable[str] = OPTIONS, *, several_gpus: bool = False
) -> None:
    """Options for fields of a scenario, by group; with `several_gpus` the number of GPUs may be a list."""
    wanted = [list_scenario_fields()[name] for name in names]
    for group, title in GROUPS.items():
        members = [info for info in wanted if info.group == group]
        if members:
            section = parser.add_argument_group(title)
            for info in members:
                _add_option(section, info, several=several_gpus and info.name == "gpus")


def _add_option(section: Any, info: FieldInfo, *, several: bool) -> None:
    help = info.described.replace("%", "%%")
    if info.kind == "flag":
        section.add_argument(info.option, action="store_true", help=help)
    elif info.name == "fsdp":  # without a number: the second version
        section.add_argument(info.option, type=int, choices=info.choices, nargs="?", const=2, help=help)
    elif info.kind == "choice":
        kind = int if isinstance(info.choices[0], int) else str
        section.add_argument(info.option, type=kind, choices=info.choices, help=help)
    elif several:
        section.add_argument(info.option, metavar="N[,N...]", help=f"{help}; several give a scaling curve")
    else:
        metavar = _NAMED.get(info.name, _METAVARS[info.kind])
        section.add_argument(info.option, type=_make_reader(info), metavar=metavar, help=help)


def _make_reader(info: FieldInfo) -> Callable[[str], Any]:
    """What argparse calls on the text of an option."""

    def read(text: str) -> Any:
        if info.kind == "text" and not text.strip():
            raise argparse.ArgumentTypeError(f"'{text}' is empty; give a value")
        try:
            return info.parse(text)
        except TraincastError as error:
            raise argparse.ArgumentTypeError(str(error).replace(f"`{info.name}` ", "")) from None

    return read


def add_scenario_file(parser: argparse.ArgumentParser) -> None:
    """The option that reads fields from a file."""
    parser.add_argument("--file", metavar="FILE", help="fields of the scenario in YAML; options override them")
    parser.add_argument(
        "--from", dest="from_file", metavar="FILE",
        help="batch and layout of a launch file: torchtitan, Megatron, DeepSpeed, ...",
    )  # fmt: skip


def read_scenario_values(args: argparse.Namespace, *, also: Iterable[str] = ()) -> dict[str, Any]:
    """The fields that were given: those of `--file`, and over them those of options."""
    values = {}
    if getattr(args, "from_file", None):
        from traincast.planner.parallelism.launch_files import read_launch_file

        values = read_launch_file(Path(args.from_file))
    values |= read_scenario(args.file, also=also) if getattr(args, "file", None) else {}
    for name in list_scenario_fields():
        value = getattr(args, name, None)
        if value is not None and value is not False:
            values[name] = value
    if getattr(args, "from_file", None) and not {"micro_batch", "global_batch", "batch_size"} & set(values):
        raise TraincastError(f"'{args.from_file}' does not state the batch, which the script has; give --micro-batch")
    return values


def require_question(values: Mapping[str, Any], command: str, platforms: str = "v100") -> None:
    """Rejects a question without a workload or without a platform, and says how each is written."""
    written = {"workload": "a WORKLOAD, such as resnet50", "on": f"--on PLATFORM, such as --on {platforms}"}
    missing = [text for name, text in written.items() if name not in values]
    if missing:
        raise TraincastError(f"{command} needs {' and '.join(missing)} (see 'traincast {command} --help')")


def parse_one_gpu_number(args: argparse.Namespace) -> dict[str, int]:
    """The number of GPUs where there may be one only."""
    if not isinstance(args.gpus, str):
        return {}
    numbers = parse_gpu_numbers(args.gpus)
    if len(numbers) > 1:
        raise TraincastError("--gpus takes one number here; give the others as edits (gpus=16) or to 'traincast sweep'")
    return {"gpus": numbers[0]}


def parse_gpu_numbers(text: str) -> list[int]:
    """The numbers of `1,2,4`, each a possible number of GPUs."""
    numbers = parse_whole_numbers("--gpus", text)
    for number in numbers:
        list_scenario_fields()["gpus"].check(number)
    return numbers
