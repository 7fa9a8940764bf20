"""Files appear whole or not at all, and only where a regular file may be."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from traincast.utils.errors import TraincastError
from traincast.utils.files.writing import check_output, replace_file, write_bytes, write_json, write_together


def left_over(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_new_file_has_the_bytes_and_the_users_permissions(tmp_path):
    old = os.umask(0o027)
    try:
        write_bytes(tmp_path / "a.bin", b"abc")
    finally:
        os.umask(old)
    assert (tmp_path / "a.bin").read_bytes() == b"abc"
    assert (tmp_path / "a.bin").stat().st_mode & 0o777 == 0o640
    assert left_over(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_what_was_there_stays_when_writing_fails(tmp_path, error):
    target = tmp_path / "a.bin"
    target.write_bytes(b"old")

    def fail():
        with replace_file(target) as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        fail()
    assert target.read_bytes() == b"old"
    assert left_over(tmp_path) == ["a.bin"]


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TraincastError, match="No space left on device"):
        write_bytes(tmp_path / "a.bin", b"abc")
    assert left_over(tmp_path) == []


def test_numbers_that_are_not_finite_are_never_written(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    assert left_over(tmp_path) == []


def test_json_is_compact(tmp_path):
    write_json(tmp_path / "a.json", {"x": [1, 2.5, "é", None]})
    assert (tmp_path / "a.json").read_text() == '{"x":[1,2.5,"\\u00e9",null]}'
    assert json.loads((tmp_path / "a.json").read_text())["x"][2] == "é"


@pytest.mark.parametrize("what", ["folder", "symlink", "dangling", "pipe", "no folder", "nothing", "zero byte"])
def test_what_is_no_place_for_a_file_is_left_alone(tmp_path, what):
    target = tmp_path / "out.json"
    other = tmp_path / "other"
    if what == "folder":
        target.mkdir()
    elif what == "symlink":
        other.write_text("mine")
        target.symlink_to(other)
    elif what == "dangling":
        target.symlink_to(other)
    elif what == "pipe":
        os.mkfifo(target)
    path = {"no folder": tmp_path / "absent" / "x", "nothing": "", "zero byte": "a\0b"}.get(what, target)
    before = left_over(tmp_path)
    with pytest.raises(TraincastError, match="cannot write"):
        write_json(path, {})
    assert left_over(tmp_path) == before
    assert what != "symlink" or other.read_text() == "mine"


def test_devices_are_refused():
    with pytest.raises(TraincastError, match="no regular file"):
        check_output(os.devnull)


def test_an_input_is_never_overwritten(tmp_path):
    source = tmp_path / "in.json"
    source.write_text("{}")
    (tmp_path / "same.json").hardlink_to(source)
    for target in (source, tmp_path / "same.json"):
        with pytest.raises(TraincastError, match="also read"):
            write_json(target, {"new": 1}, inputs=[source, tmp_path / "absent"])
    assert source.read_text() == "{}"


def draft(folder, name, *, seconds_old):
    path = folder / name
    path.write_bytes(b"half")
    then = time.time() - seconds_old
    os.utime(path, (then, then))
    return path


def test_drafts_of_killed_processes_go_when_the_file_is_written_again(tmp_path):
    stale = ".a.bin.0123456789abcdef.tmp"
    draft(tmp_path, stale, seconds_old=100)
    draft(tmp_path, ".a.bin.fedcba9876543210.tmp", seconds_old=1)  # its process may not have locked it yet
    draft(tmp_path, ".b.bin.0123456789abcdef.tmp", seconds_old=100)  # of another file
    draft(tmp_path, ".a.bin.mine.tmp", seconds_old=100)  # not ours
    (tmp_path / ".a.bin.0000000000000000.tmp").symlink_to(tmp_path / "b")
    others = left_over(tmp_path)
    write_bytes(tmp_path / "a.bin", b"new")
    assert left_over(tmp_path) == sorted({*others, "a.bin"} - {stale})


def test_the_draft_of_a_living_process_stays(tmp_path):
    with replace_file(tmp_path / "a.bin") as file:
        file.write(b"slow")
        (name,) = left_over(tmp_path)
        os.utime(tmp_path / name, (0, 0))
        write_bytes(tmp_path / "a.bin", b"fast")
        assert left_over(tmp_path) == sorted([name, "a.bin"])
    assert (tmp_path / "a.bin").read_bytes() == b"slow"
    assert left_over(tmp_path) == ["a.bin"]


def test_ctrl_c_between_two_files_waits_for_the_second(tmp_path, monkeypatch):
    put_in_place = Path.replace

    def interrupted(self, target):
        put_in_place(self, target)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Path, "replace", interrupted)
    other = threading.Event()  # another thread may take the signal
    thread = threading.Thread(target=other.wait, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        write_together({tmp_path / "a": b"1", tmp_path / "b": b"2", tmp_path / "c": b"3"})
    other.set()
    thread.join()
    assert left_over(tmp_path) == ["a", "b", "c"]
