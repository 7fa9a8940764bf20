"""Work in a process of its own: bounded, without network, unable to change files, and its crash is told."""

import ctypes
import faulthandler
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from traincast.utils.errors import TraincastError
from traincast.utils.parallel.apart import Ended, forbid_writes, make_scratch, run_apart

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what holds a process back is Linux's")


def _run(work, seconds: float = 30.0) -> tuple[Ended, list[str]]:
    told: list[str] = []
    with make_scratch() as scratch:
        return run_apart(work, scratch, listener=told.append, seconds=seconds), told


def _fail(error: BaseException):
    raise error


def test_work_tells_what_it_does_and_leaves_files_in_its_scratch_folder():
    with make_scratch() as scratch:

        def work(tell):
            tell("half")
            (Path(scratch) / "left.txt").write_text("x")

        told: list[str] = []
        assert run_apart(work, scratch, listener=told.append, seconds=30.0) == Ended("", own=True)
        assert told == ["half"]
        assert (Path(scratch) / "left.txt").read_text() == "x"


@pytest.mark.parametrize("daemon", [False, True])
def test_processes_that_the_caller_has_started_are_not_those_of_the_work(daemon):
    """The work's process inherits the list of them: ending them would end the caller's, and joining them fails, so that
    it went on as a second caller and took the scratch folder with it while the first was still reading."""
    other = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=daemon)
    other.start()
    try:
        with make_scratch() as scratch:
            left = Path(scratch) / "left.txt"

            def work(tell):
                tell("nearly done")
                left.write_text("x")

            assert not run_apart(work, scratch, listener=lambda _: time.sleep(1.0), seconds=30.0).failure
            assert left.exists() and other.is_alive()
    finally:
        other.kill()
        other.join()


def test_what_the_work_and_its_programs_print_goes_to_the_streams_of_this_process(capsys):
    def work(tell):
        print("printed ü", end="", flush=True)
        print("said", file=sys.stderr)
        subprocess.run(["echo", ", echoed"])
        print("x" * 300_000)  # more than a pipe holds
        print("and the end", end="")
        _fail(TraincastError("no such thing"))

    ended, _ = _run(work)

    assert ended == Ended("no such thing", own=True)
    out, err = capsys.readouterr()
    assert out == f"printed ü, echoed\n{'x' * 300_000}\nand the end" and err == "said\n"


def test_work_may_close_its_streams():
    ended, _ = _run(lambda tell: (sys.stdout.close(), sys.stderr.close()))
    assert ended == Ended("", own=True)


def test_an_error_of_the_work_comes_back_as_its_text():
    ended, _ = _run(lambda tell: _fail(TraincastError("no such thing")))
    assert ended == Ended("no such thing", own=True)


def test_a_defect_of_the_work_comes_back_with_its_trace():
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        _run(lambda tell: _fail(ZeroDivisionError("0")))


@pytest.mark.parametrize(("crash", "name"), [(lambda: ctypes.string_at(0), "SIGSEGV"), (os.abort, "SIGABRT")])
def test_a_crash_outside_of_python_is_told_by_its_signal(crash, name):
    ended, _ = _run(lambda tell: (faulthandler.disable(), crash()))
    assert not ended.own and name in ended.failure and "crash outside of Python" in ended.failure


def test_a_crash_is_told_with_what_was_done_last():
    ended, _ = _run(lambda tell: (faulthandler.disable(), tell("rank 0"), tell("rank 1"), os.abort()))
    assert ended.failure.endswith("a crash outside of Python (rank 1)")


def test_work_that_takes_too_long_is_ended_with_what_it_started():
    def work(tell):
        tell(str(subprocess.Popen(["sleep", "60"]).pid))
        time.sleep(60)

    ended, told = _run(work, seconds=1.0)
    assert ended == Ended("it was not done after 1 s", own=False)
    time.sleep(0.1)
    state = Path(f"/proc/{told[0]}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_work_that_fills_too_much_memory_is_ended(monkeypatch):
    monkeypatch.setattr("traincast.utils.parallel.apart._MEMORY_SHARE", 1e-6)
    ended, _ = _run(lambda tell: time.sleep(10))
    assert not ended.own and "memory" in ended.failure


def test_code_outside_of_python_changes_no_file(tmp_path: Path):
    if not _has_landlock():
        pytest.skip("this kernel has no Landlock")
    mine, new = tmp_path / "mine.txt", tmp_path / "new.txt"
    mine.write_text("precious")
    native = ctypes.CDLL(None)

    def work(tell):
        opened = native.open(str(mine).encode(), os.O_WRONLY | os.O_TRUNC)
        removed = native.unlink(str(mine).encode())
        shell = subprocess.run(f"echo x > {new}; mkdir {tmp_path}/folder", shell=True, stderr=subprocess.DEVNULL)
        tell(f"{opened} {removed} {shell.returncode != 0}")

    ended, told = _run(work)
    assert ended == Ended("", own=True) and told == ["-1 -1 True"]
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"] and mine.read_text() == "precious"


def test_no_code_reaches_another_machine_and_this_one_can_be_reached():
    def work(tell):
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()
            with socket.create_connection(server.getsockname(), timeout=2):
                tell("here")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as away:
            try:
                away.connect(("192.0.2.1", 53))
            except OSError:
                tell("not there")

    _, told = _run(work)
    assert told == ["here", "not there"]


def test_changes_are_found_where_the_kernel_holds_nothing_back(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("traincast.utils.parallel.apart.forbid_writes", lambda folders: False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("precious")
    ended, _ = _run(lambda tell: (tmp_path / "mine.txt").write_text("other"))
    assert ended.changed == (str(tmp_path / "mine.txt"),)


def _has_landlock() -> bool:
    child = os.fork()
    if not child:
        os._exit(0 if forbid_writes([]) else 1)
    return os.waitpid(child, 0)[1] == 0
