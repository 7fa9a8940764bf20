"""Options of the command line that come from the fields of a scenario, and the scenario that they describe."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from traincast.app.cli.arguments import parse_whole_numbers
from traincast.simulator.scenario.fields import GROUPS, FieldInfo, list_scenario_fields, read_scenario
from traincast.utils.errors import TraincastError

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
