"""Commands that write, ended at random moments and on a full disk; `scripts/interrupt` does it fifty times for each."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from tests.app.cli import interrupting
from tests.app.cli.interrupting import BEFORE, COMMANDS, Trial, broken
from traincast.app.cli import main as command_line
from traincast.app.cli.main import Signals, Terminated, raise_signals


@pytest.mark.parametrize("name", ["predict", "export", "trace to a workload"])
def test_a_signal_or_a_full_disk_leaves_whole_files(name, tmp_path):
    interrupting.imported(COMMANDS[name])
    assert broken(name, 2, seed=3, folder=tmp_path, warm=True) == {}


def test_a_file_half_written_is_seen(tmp_path):
    trial = Trial("export", tmp_path)
    trial.targets[0].write_bytes(trial.wholes[0][:-1])
    assert trial.wrong(9, -9, "") == "half written"
    trial.targets[0].write_bytes(BEFORE)
    assert trial.wrong(9, -9, "") == ""
    (tmp_path / ".out.0123456789abcdef.tmp").touch()
    assert "1 drafts left" in trial.wrong(2, 130, "traincast: interrupted\n")
    assert "Traceback" in trial.wrong(2, 130, "Traceback (most recent call last)")


@pytest.mark.parametrize(("number", "code", "says"), [(15, 143, "terminated"), (2, 130, "interrupted")])
def test_a_signal_inside_an_import_is_no_mistake_of_ours(monkeypatch, capsys, number, code, says):
    """C code that imports a module reports the signal's exception as a failure of the import."""

    signals = Signals()

    def failing(_):
        try:
            signals.receive(number, None)
        except BaseException as error:
            raise ImportError("cannot load module") from error

    monkeypatch.setattr(command_line, "_parse", failing)
    assert command_line._run([], signals) == code
    assert capsys.readouterr().err == f"traincast: {says}\n"


def test_an_import_that_fails_by_itself_is_a_mistake_of_ours(monkeypatch, capsys):
    def failing(_):
        raise ImportError("cannot load module")

    monkeypatch.setattr(command_line, "_parse", failing)
    assert command_line._run([], Signals()) == command_line.INTERNAL_ERROR
    assert "internal error" in capsys.readouterr().err


def test_a_signal_before_the_command_begins_is_answered_when_it_does(monkeypatch, capsys):
    monkeypatch.setattr(command_line, "_parse", lambda _: pytest.fail("it goes on"))
    with raise_signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert command_line._run([], signals) == 143
    assert capsys.readouterr().err == "traincast: terminated\n"


def test_a_signal_after_the_answer_changes_nothing():
    with raise_signals() as signals:
        signals.settle()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    assert signals.exit_code is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_clean_up_of_an_object_is_raised_after_it(number, capsys):
    class Dying:
        def __del__(self):
            signal.raise_signal(number)

    with raise_signals() as signals:
        signals.begin()
        Dying()
        with pytest.raises((KeyboardInterrupt, Terminated)):
            time.sleep(60)  # the signal comes again meanwhile, and ends the wait

    assert signals.exit_code == 128 + number
    assert capsys.readouterr().err == ""


def test_a_signal_that_comes_again_before_the_clean_up_has_ended_is_not_lost(monkeypatch):
    class Dying:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    start = threading.Thread.start

    def slowly(thread):
        start(thread)
        time.sleep(0.1)  # a busy machine: meanwhile the signal has come again

    monkeypatch.setattr(threading.Thread, "start", slowly)
    with raise_signals() as signals:
        signals.begin()
        Dying()
        with pytest.raises(Terminated):
            time.sleep(60)


def test_other_exceptions_in_the_clean_up_of_an_object_are_said(capsys):
    class Dying:
        def __del__(self):
            raise ValueError("said")

    with raise_signals() as signals:
        signals.begin()
        Dying()

    assert "ValueError: said" in capsys.readouterr().err
