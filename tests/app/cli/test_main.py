"""Commands, exit codes, and messages as the command line writes them."""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from pathlib import Path

import pytest

import traincast
from traincast.app.cli import main as main_module
from traincast.app.cli.arguments import parse_gpu_numbers, read_scenario_values
from traincast.app.cli.main import main
from traincast.app.cli.output import name_options, print_result, show_progress_bar, show_progress_line
from traincast.app.cli.registry import build_parsers, list_commands, list_options
from traincast.utils.errors import TraincastError
from traincast.utils.results import Result
from traincast.utils.version import __version__

OPTIONS = {"batch_size": "--batch-size", "mode": "--mode", "on": "--on", "gpus": "--gpus"}


class Answer(Result):
    def to_dict(self):
        return {"iteration_ms": 1.5}

    def headline(self):
        return "1.5 ms"


@pytest.mark.parametrize(
    ("message", "written"),
    [
        ("give a `batch_size` or leave `gpus` out", "give a --batch-size or leave --gpus out"),
        ("Add `mode='inference'`", "Add --mode inference"),
        ("`on='here'`: not built", "--on here: not built"),
        ("`gpus=0`; give more", "--gpus 0; give more"),
        ("`traincast models` lists them", "`traincast models` lists them"),
        ("leave `seq_len` out", "leave `seq_len` out"),
        ("'batch_size' is no file", "'batch_size' is no file"),
    ],
)
def test_parameters_are_written_as_options_of_the_verb(message, written):
    assert name_options(message, OPTIONS) == written


def test_only_the_command_line_writes_options():
    _, made = build_parsers(list_commands())
    written = {name for parser in made.values() for name in list_options(parser).values()}
    package = Path(traincast.__file__).parent
    library = [path for path in package.rglob("*.py") if "cli" not in path.relative_to(package).parts]

    assert len(library) > 100
    for path in library:
        words = set(re.findall(r"--[a-z][a-z-]+", path.read_text(encoding="utf-8")))
        assert not words & written, path


def test_options_of_a_parser_are_its_long_names():
    parser = argparse.ArgumentParser()
    parser.add_argument("workload")
    parser.add_argument("-o", "--out")
    parser.add_argument("--batch-size")

    assert list_options(parser) == {"help": "--help", "out": "--out", "batch_size": "--batch-size"}


def test_the_same_mistake_is_written_for_either_reader(capsys):
    with pytest.raises(TraincastError, match=r"leave out `seq_len`$"):
        traincast.predict("resnet50", on="v100", seq_len=4)
    assert main(["predict", "resnet50", "--on", "v100", "--seq-len", "4"]) == 2
    assert capsys.readouterr().err.endswith("leave out --seq-len\n")


def test_only_the_verbs_wanted_are_imported():
    sys.modules.pop("traincast.app.cli.commands.platforms", None)
    _, made = build_parsers(["models"])

    assert list(made) == ["models"]
    assert "traincast.app.cli.commands.platforms" not in sys.modules


def test_every_verb_has_a_summary_and_a_description():
    _, made = build_parsers(list_commands())

    assert list(made) == list(list_commands())
    for command, parser in made.items():
        assert parser.description, command
        assert "--json" in list_options(parser).values()


def test_help_lists_every_verb(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in list_commands())


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"traincast {__version__}\n"


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (TraincastError("bad `batch_size`"), 2, "traincast: bad --batch-size\n"),
        (PermissionError(13, "Permission denied", "a.tc"), 2, "traincast: 'a.tc': Permission denied\n"),
        (ModuleNotFoundError("", name="torch"), 2, "traincast: this needs torch: pip install 'traincast[capture]'\n"),
        (KeyboardInterrupt(), 130, "traincast: interrupted\n"),
    ],
)  # fmt: skip
def test_errors_become_one_line_and_an_exit_code(capsys, monkeypatch, raised, code, said):
    def run(_):
        raise raised

    monkeypatch.setattr(main_module, "_parse", lambda _: argparse.Namespace(run=run, options=OPTIONS))

    assert main(["predict"]) == code
    assert capsys.readouterr().err == said


def test_a_mistake_of_our_own_is_shown_whole_to_who_looks_for_it(monkeypatch):
    monkeypatch.setenv("TRAINCAST_DEBUG", "1")

    def run(_):
        raise ModuleNotFoundError("No module named 'traincast.nowhere'", name="traincast.nowhere")

    monkeypatch.setattr(main_module, "_parse", lambda _: argparse.Namespace(run=run, options={}))
    with pytest.raises(ModuleNotFoundError):
        main(["predict"])


@pytest.mark.parametrize("text", ["", "1,", "a", "-1", "1.5", "1234567890", "٣"])
def test_what_is_no_list_of_numbers_is_refused(text):
    with pytest.raises(TraincastError, match=f"--gpus {text}: give an integer"):
        parse_gpu_numbers(text)


def test_numbers_may_have_spaces_between():
    assert parse_gpu_numbers("1, 2 ,16") == [1, 2, 16]


def test_only_the_fields_that_were_given_are_values_of_the_scenario():
    args = argparse.Namespace(workload="x", batch_size=3, seq_len=None, compiled=False, to="pytorch")

    assert read_scenario_values(args) == {"workload": "x", "batch_size": 3}


def test_a_result_is_printed_as_a_document_or_as_text(capsys):
    print_result(Answer(), Answer.headline, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"iteration_ms": 1.5}
    print_result(Answer(), Answer.headline, as_json=False)
    assert capsys.readouterr().out == "1.5 ms\n"


def test_progress_is_silent_where_nobody_watches(capsys):
    with show_progress_bar("fit") as progress:
        progress(0.5)
    assert capsys.readouterr().err == ""


def test_words_of_progress_stay_on_one_line_and_are_wiped(capsys, monkeypatch):
    with show_progress_line("capturing x.py:f") as progress:
        progress("batch 2")
    assert capsys.readouterr().err == ""

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with show_progress_line("capturing x.py:f") as progress:
        progress("batch 2")
        progress("rank " * 40)

    first, second, end = capsys.readouterr().err.split("\r\x1b[K")[1:]
    assert first == "capturing x.py:f: batch 2 (0 s)"
    assert second == ("capturing x.py:f: " + "rank " * 40)[:78]
    assert end == ""


def test_progress_is_drawn_on_a_terminal_and_wiped(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with show_progress_bar("fit") as progress:
        progress(0.5)

    drawn = capsys.readouterr().err
    assert "\rfit " + "█" * 15 + " " * 15 + "  50%" in drawn
    assert drawn.endswith("\r\x1b[K")


def test_a_mistake_of_ours_is_one_line_to_report_and_exit_code_70(capsys, monkeypatch):
    def broken(*_, **__):
        raise KeyError("nobody\nexpected this")

    monkeypatch.setattr("traincast.app.cli.main._parse", broken)

    assert main(["models"]) == 70
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "internal error" in said and "KeyError" in said and "test_main.py" in said


def test_a_message_with_line_breaks_and_escapes_stays_one_printable_line(capsys):
    assert main(["predict", "no\nsuch\x1b[31m" + "x" * 5000, "--on", "v100"]) == 2
    said = capsys.readouterr().err.removesuffix("\n")
    assert said.isprintable() and len(said) < 2000
    assert "no\\nsuch\\x1b[31m" in said


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["predcit", "resnet50"], "Did you mean predict?"),
        (["predict", "resnet50", "--on", "v100", "--batchsize", "4"], "Did you mean --batch-size?"),
        (["predict", "resnet50", "--on", "v100", "--batch_size", "4"], "Did you mean --batch-size?"),
        (["predict", "resnet50", "--on", "v100", "--batch", "4"], "Did you mean --batch-size?"),
        (["predict", "resnet50", "--on", "A100"], "Did you mean a100-40gb, a100-40gb-pcie, a100-80gb, a100-80gb-pcie?"),
        (["predict", "resnet50", "--on", "H100"], "Did you mean h100?"),
        (["predict", "ResNet50", "--on", "v100"], "Did you mean resnet50"),
        (["predict", "resnet50", "v100"], "Did you mean --on v100?"),
        (["predict", "resnet50"], "predict needs --on PLATFORM, such as --on v100"),
        (["predict", "resnet50", "--on", "v100", "--bs", "4"], "Did you mean --batch-size?"),
        (["predict", "resnet50", "--on", "v100", "--dtype", "half"], "Did you mean fp16?"),
        (["predict", "resnet50", "--on", "NVIDIA H100 80GB HBM3"], "Did you mean h100"),
        (["predict", "resnet50", "--on", "8xh100"], "--gpus says how many"),
        (["predict", "resnet50", "--on", "v100", "--price", "2,5"], "one price of all GPUs, such as 2.5"),
        (["compare", "resnet50", "--on", "v100", "--price", "V100=2"], "unknown platform of a price 'V100'"),
        (["whatif", "resnet50", "--on", "v100", "dtype=bf16"], "Did you mean --set dtype=bf16?"),
    ],
)
def test_what_was_meant_is_suggested_whatever_its_case(capsys, words, meant):
    assert main(words) == 2
    assert meant in capsys.readouterr().err


def test_alone_it_shows_commands_by_task_with_an_example_each(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])

    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert shown.startswith("How long will one training step")
    assert shown.count("$ traincast ") == len(list_commands())
    assert "Your own model and machine\n" in shown


@pytest.mark.parametrize("columns", ["80", "100"])
def test_help_of_every_command_fits_on_a_screen_and_names_every_option(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    _, made = build_parsers(list_commands())
    for command, parser in made.items():
        text = parser.format_help()
        assert len(text.splitlines()) <= (60 if columns == "100" else 75), command
        assert max(map(len, text.splitlines())) <= max(int(columns), 100), command
        known = set(list_options(parser).values()) - {"--help", "--help-all"}
        assert [name for name in known if name not in text] == [], command


def test_colours_are_for_terminals_that_want_them(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    main(["predict", "resnet50", "--on", "v100"])
    assert "\x1b[1m" in capsys.readouterr().out

    monkeypatch.setenv("NO_COLOR", "1")
    main(["predict", "resnet50", "--on", "v100"])
    assert "\x1b" not in capsys.readouterr().out


def test_what_the_server_imports_is_installed_by_an_extra_that_is_named():
    trees = [ast.parse(file.read_text()) for file in (Path(traincast.__file__).parent / "app" / "server").glob("*.py")]
    imported = {
        name.partition(".")[0]
        for node in (node for tree in trees for node in ast.walk(tree))
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else
                     [one.name for one in node.names] if isinstance(node, ast.Import) else [])
    }  # fmt: skip
    assert imported - set(sys.stdlib_module_names) - {"traincast", "msgspec", "numpy", "yaml"} <= set(
        main_module.OPTIONAL
    )
