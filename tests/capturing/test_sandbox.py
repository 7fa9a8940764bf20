"""A captured script changes no file, deletes none and reaches no other machine; what it would have done is told."""

import textwrap
from pathlib import Path

import pytest
import torch

from traincast.capturing.from_file import capture_function
from traincast.capturing.sandbox import use_sandbox
from traincast.ir.workload import KEPT_BACK

_LOOP = """
import os, pathlib, shutil, socket, sqlite3, tempfile
import numpy as np
import torch
from torch import nn

model = nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(6):
    optimizer.zero_grad()
    model(torch.rand(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    {}
"""
_DEEDS = {
    'torch.save(model.state_dict(), "mine.txt")': "wrote mine.txt",
    'open("mine.txt", "w").write("x"); assert open("mine.txt").read() == "x"': "wrote mine.txt",
    'open("mine.txt", "a").write("x"); assert open("mine.txt").read().startswith("precious")': "wrote mine.txt",
    'np.save("new.npy", np.zeros(3)); assert np.load("new.npy").shape == (3,)': "wrote new.npy",
    'pathlib.Path("mine.txt").write_text("x")': "wrote mine.txt",
    'sqlite3.connect("base.db").execute("create table if not exists t (a)")': "wrote base.db",
    'os.makedirs("runs/a", exist_ok=True); open("runs/a/log", "w").close(); assert os.listdir("runs/a") == ["log"]': (
        "made folder runs, runs/a"
    ),
    'i or os.remove("mine.txt"); assert not os.path.exists("mine.txt")': "deleted mine.txt",
    'i or shutil.rmtree("folder"); assert not pathlib.Path("folder/inside.txt").exists()': "deleted folder",
    'i or os.replace("mine.txt", "other.txt"); assert open("other.txt").read() == "precious"': "moved to other.txt",
    'i or pathlib.Path("mine.txt").rename("other.txt"); assert not os.path.exists("mine.txt")': "deleted mine.txt",
    'tempfile.NamedTemporaryFile().write(b"x")': None,
}


def _list_files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below a folder: when it was changed, and what it has."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
    }


def _write_script(folder: Path, text: str) -> str:
    (folder / "folder").mkdir()
    for name in ("mine.txt", "folder/inside.txt"):
        (folder / name).write_text("precious")
    script = folder / "train.py"
    script.write_text(text)
    return str(script)


@pytest.mark.parametrize(("deed", "told"), _DEEDS.items())
def test_nothing_of_the_users_is_changed(deed: str, told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = _write_script(tmp_path, _LOOP.format(deed))
    before = _list_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    workload = capture_function(script)
    assert _list_files(tmp_path) == before
    if told is None:
        assert KEPT_BACK not in workload.meta
    else:
        assert told in workload.meta[KEPT_BACK]
        assert told in workload.contents()


def test_a_function_and_the_file_that_has_it_are_kept_in_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = """
    import torch
    open("while_loading.txt", "w").close()

    def make_step(batch_size):
        model = torch.nn.Linear(8, 8).cuda()

        def step():
            model(torch.rand(batch_size, 8, device="cuda")).sum().backward()
            torch.save(model, "mine.txt")

        return step
    """
    script = _write_script(tmp_path, textwrap.dedent(text))
    before = _list_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    workload = capture_function(f"{script}:make_step", batch_size=4, rebatch=False)
    assert _list_files(tmp_path) == before
    assert workload.meta[KEPT_BACK] == "wrote while_loading.txt, mine.txt"


def test_the_network_is_closed_and_named(tmp_path: Path):
    deed = """
    try:
        socket.create_connection(("example.org", 80))
        reached = True
    except OSError:
        reached = False
    assert not reached
    """
    script = _write_script(tmp_path, _LOOP.format(textwrap.indent(textwrap.dedent(deed), "    ").strip()))
    assert capture_function(script).meta[KEPT_BACK] == "asked the network for example.org"


def test_files_are_as_before_once_the_sandbox_is_left(tmp_path: Path):
    with use_sandbox():
        (tmp_path / "a").write_text("x")
        assert (tmp_path / "a").read_text() == "x"
        assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert not list(tmp_path.iterdir())
    torch.save({}, tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_what_a_script_has_written_is_found_by_libraries_that_read_natively(tmp_path: Path, monkeypatch):
    (tmp_path / "pyarrow.py").write_text("import _io\ndef memory_map(path):\n    return _io.FileIO(path)\n")
    deed = 'open("set.arrow", "w").write("x"); import pyarrow; assert pyarrow.memory_map("set.arrow").read() == b"x"'
    script = _write_script(tmp_path, _LOOP.format(deed))
    monkeypatch.chdir(tmp_path)
    assert capture_function(script).meta[KEPT_BACK] == "wrote set.arrow"
    assert not (tmp_path / "set.arrow").exists()
