"""Around a captured script: what it writes, moves or deletes happens in a scratch folder, the network is closed, and
both are told."""

from __future__ import annotations

import _io
import builtins
import errno
import io
import os
import shutil
import signal
import socket
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISDIR
from types import SimpleNamespace
from typing import Any

import torch

from traincast.capturing.patches import Patches
from traincast.ir.workload import KEPT_BACK
from traincast.utils.errors import TraincastError
from traincast.utils.parallel.apart import SCRATCH, make_scratch

# ruff: noqa: PTH100, PTH117, PTH118, PTH120
# Paths stay texts: pathlib itself asks the functions that stand here.


_UNTOUCHED = ("/dev/", "/proc/", "/sys/")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_real = SimpleNamespace(  # in one object: names of modules are replaced by the overlay's own functions
    open=builtins.open, os_open=os.open, stat=os.stat, lstat=os.lstat, scandir=os.scandir, mkdir=os.mkdir,
    unlink=os.unlink, rmdir=os.rmdir, rename=os.rename, makedirs=os.makedirs, readlink=os.readlink,
    copyfile=shutil.copyfile, rmtree=shutil.rmtree, connect=sqlite3.connect,
)  # fmt: skip
_Path = Any


class FileOverlay:
    """A folder that stands in front of all others: writes go there, reads look there first, deletions are noted.

    `note` hears what was done ("wrote", "deleted", "moved") and to which path.
    """

    def __init__(self, folder: str, note: Callable[[str, str], None]) -> None:
        self._folder, self._root, self._note = folder, os.path.join(folder, "files"), note
        self._gone: set[str] = set()

    def install_hooks(self, patches: Patches) -> None:
        """Puts the overlay in front of Python's file functions until the patches are undone."""
        for owner in (builtins, io, _io):
            patches.set_attribute(owner, "open", self.open_file)
        readers = {
            "stat": _real.stat,
            "lstat": _real.lstat,
            "access": os.access,
            "chdir": os.chdir,
            "readlink": os.readlink,
            "statvfs": os.statvfs,
        }
        changers = {
            name: getattr(os, name)
            for name in ("truncate", "chmod", "chown", "lchown", "utime", "setxattr", "removexattr", "mkfifo")
            if hasattr(os, name)
        }
        hooks: dict[str, Any] = {
            "open": self._open_descriptor, "listdir": self._list_names, "scandir": self._scan_entries,
            "mkdir": self._make_folder, "remove": self._delete_file, "unlink": self._delete_file,
            "rmdir": self._delete_folder, "rename": self._move_path, "replace": self._move_path,
            "symlink": self._make_link(os.symlink), "link": self._make_link(os.link),
            **{name: self._redirect_reads(function) for name, function in readers.items()},
            **{name: self._redirect_writes(function) for name, function in changers.items()},
        }  # fmt: skip
        for name, hook in hooks.items():
            patches.set_everywhere(os, name, hook)
        patches.set_everywhere(shutil, "rmtree", self._delete_tree)
        patches.set_everywhere(sqlite3, "connect", self._connect_database)

    def find_read_path(self, path: _Path) -> _Path:
        """Where to read what the script calls `path`; raises `FileNotFoundError` for what it has deleted."""
        full = self._find_full_path(path)
        if full is None:
            return path
        mirror, gone = self._root + full, self._is_gone(full)
        if _exists(mirror) and (gone or not _is_folder(mirror) or not _is_folder(full)):
            return mirror
        if gone:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), full)
        return path

    def find_write_path(self, path: _Path, *, keep: bool = False, what: str = "wrote") -> _Path:
        """Where to write what the script calls `path`; with `keep` what is there now is copied first."""
        full = self._find_full_path(path)
        if full is None:
            return path
        mirror = self._root + full
        self._make_parents(full)
        if keep and not _exists(mirror) and not self._is_gone(full) and _is_file(full):
            _real.copyfile(full, mirror)
        self._note(what, full)
        return mirror

    def open_file(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """`open`, in the overlay where it writes."""
        if isinstance(file, int):
            return _real.open(file, mode, *args, **kwargs)
        if not any(letter in mode for letter in "wax+"):
            return _real.open(self.find_read_path(file), mode, *args, **kwargs)
        full = self._find_full_path(file)
        if full is not None and "x" in mode and self._is_there(full):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), full)
        if full is not None and "r" in mode and not self._is_there(full):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), full)
        return _real.open(self.find_write_path(file, keep="w" not in mode), mode, *args, **kwargs)

    def _find_full_path(self, path: _Path) -> str | None:
        """The absolute path; None for what is no file of the user's (descriptors, devices, the scratch folder)."""
        if path is None or isinstance(path, int):
            return None
        full = os.path.abspath(os.fsdecode(path))
        inside = full == self._folder or full.startswith(self._folder + os.sep)
        return None if inside or full.startswith(_UNTOUCHED) else full

    def _is_gone(self, full: str) -> bool:
        """Whether the script has deleted the path, or a folder above it."""
        if not self._gone:
            return False
        while full not in self._gone:
            above = os.path.dirname(full)
            if above == full:
                return False
            full = above
        return True

    def _is_there(self, full: str) -> bool:
        return _exists(self._root + full) or (not self._is_gone(full) and _exists(full))

    def _make_parents(self, full: str) -> None:
        above = os.path.dirname(full)
        if not self._is_there(above):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), full)
        _real.makedirs(self._root + above, exist_ok=True)

    def _redirect_reads(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(path: _Path = ".", *args: Any, **kwargs: Any) -> Any:
            return original(self.find_read_path(_join_descriptor(path, kwargs)), *args, **kwargs)

        return read

    def _redirect_writes(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def write(path: _Path, *args: Any, **kwargs: Any) -> Any:
            path = _join_descriptor(path, kwargs)
            full = self._find_full_path(path)
            if full is not None and not _exists(self._root + full) and _is_folder(full):
                return None  # rights and times of a folder of the user's stay
            return original(self.find_write_path(path, keep=True), *args, **kwargs)

        return write

    def _open_descriptor(self, path: _Path, flags: int, mode: int = 0o777, **kwargs: Any) -> int:
        path = _join_descriptor(path, kwargs)
        if flags & _WRITES:
            full = self._find_full_path(path)
            if full is not None and flags & os.O_EXCL and self._is_there(full):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), full)
            path = self.find_write_path(path, keep=not flags & os.O_TRUNC)
        else:
            path = self.find_read_path(path)
        return int(_real.os_open(path, flags, mode, **kwargs))

    def _list_names(self, path: _Path = ".") -> list[str]:
        return [entry.name for entry in self._scan_entries(path)]

    def _scan_entries(self, path: _Path = ".") -> Any:
        full = self._find_full_path(path)
        if full is None or not _exists(self._root + full):
            return _real.scandir(self.find_read_path(path))
        with _real.scandir(self._root + full) as mirrored:
            entries = list(mirrored)
        names = {entry.name for entry in entries}
        if not self._is_gone(full) and _exists(full):
            with _real.scandir(full) as real:
                entries += [e for e in real if e.name not in names and os.path.join(full, e.name) not in self._gone]
        return _Entries(entries)

    def _make_folder(self, path: _Path, mode: int = 0o777, **kwargs: Any) -> None:
        path = _join_descriptor(path, kwargs)
        full = self._find_full_path(path)
        if full is None:
            _real.mkdir(path, mode)
            return
        if self._is_there(full):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), full)
        self._make_parents(full)
        _real.mkdir(self._root + full, mode)
        self._note("made folder", full)

    def _delete_file(self, path: _Path, **kwargs: Any) -> None:
        self._delete_path(_join_descriptor(path, kwargs), _real.unlink)

    def _delete_folder(self, path: _Path, **kwargs: Any) -> None:
        path = _join_descriptor(path, kwargs)
        if self._find_full_path(path) is not None and self._list_names(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self._delete_path(path, _real.rmdir)

    def _delete_tree(self, path: _Path, ignore_errors: bool = False, onerror: Any = None, **kwargs: Any) -> None:
        full = self._find_full_path(path)
        if full is None:
            _real.rmtree(path, ignore_errors, onerror)
        elif self._is_there(full) or not ignore_errors:
            self._delete_path(path, lambda mirror: _real.rmtree(mirror, ignore_errors=True))

    def _delete_path(self, path: _Path, delete: Callable[[str], Any]) -> None:
        full = self._find_full_path(path)
        if full is None:
            delete(path)
            return
        if not self._is_there(full):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), full)
        real = not self._is_gone(full) and _exists(full)
        if _exists(self._root + full):
            delete(self._root + full)
        if real:
            self._gone.add(full)
            self._note("deleted", full)

    def _move_path(self, source: _Path, target: _Path, **kwargs: Any) -> None:
        start, end = self._find_full_path(source), self._find_full_path(target)
        if start is None and end is None:
            _real.rename(source, target)
            return
        if start is not None and not self._is_there(start):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), start)
        if start is not None and not _exists(self._root + start) and not _is_file(start):
            raise TraincastError(
                f"the script moves the folder {start}, which a capture does not do to yours; give it a copy"
            )
        place = self.find_write_path(target, what="moved to")
        if start is None or _exists(self._root + start):
            _real.rename(source if start is None else self._root + start, place)
        else:
            _real.copyfile(start, place)
        if start is not None and _exists(start):
            self._gone.add(start)
            self._note("deleted", start)

    def _make_link(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def link(source: _Path, target: _Path, *args: Any, **kwargs: Any) -> None:
            full = self._find_full_path(source)
            original(source if full is None else self.find_read_path(full), self.find_write_path(target))

        return link

    def _connect_database(self, database: Any, *args: Any, **kwargs: Any) -> Any:
        if not (isinstance(database, str) and database.startswith((":", "file:"))):
            database = self.find_write_path(database, keep=True)
        return _real.connect(database, *args, **kwargs)


class _Entries:
    """Entries of a folder, as `os.scandir` gives them."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Any:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives nothing more."""
        self._entries = iter(())


def _join_descriptor(path: _Path, kwargs: dict[str, Any]) -> _Path:
    """The path that `dir_fd` stands for."""
    descriptor = kwargs.pop("dir_fd", None)
    if descriptor is None or os.path.isabs(os.fsdecode(path)):
        return path
    return os.path.join(_real.readlink(f"/proc/self/fd/{descriptor}"), os.fsdecode(path))


def _exists(path: str) -> bool:
    try:
        _real.lstat(path)
    except OSError:
        return False
    return True


def _is_file(path: str) -> bool:
    return _exists(path) and not _is_folder(path)


def _is_folder(path: str) -> bool:
    try:
        return S_ISDIR(_real.stat(path).st_mode)
    except OSError:
        return False


_SETTINGS = {  # of libraries that would talk to servers from processes of their own
    "WANDB_MODE": "disabled", "WANDB_SILENT": "true", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1", "COMET_MODE": "disabled", "CLEARML_OFFLINE_MODE": "1",
}  # fmt: skip
_LOCAL = ("localhost", "127.", "::1", "0.0.0.0")
_MOST_NAMED = 5


@dataclass
class Sandbox:
    """What a script would have done, by kind ("wrote", "deleted", "asked"), each thing once."""

    folder: str
    done: dict[str, dict[str, None]] = field(default_factory=dict)

    def note_deed(self, kind: str, what: str) -> None:
        """Notes one thing that was kept back."""
        here = f"{Path.cwd()}{os.sep}"
        self.done.setdefault(kind, {})[what.removeprefix(here)] = None

    @property
    def meta(self) -> dict[str, str]:
        """The entry of a workload's `meta`; none where nothing was kept back."""
        text = "; ".join(_list_things(kind, list(things)) for kind, things in self.done.items())
        return {KEPT_BACK: text} if text else {}


def _list_things(kind: str, things: list[str]) -> str:
    more = len(things) - _MOST_NAMED
    return f"{kind} {', '.join(things[:_MOST_NAMED])}{f' and {more} more' if more > 0 else ''}"


def _end_as_others_do() -> None:
    """A process that the script makes ends when it is told to, whatever this one does then."""
    if _current.get() is not None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_end_as_others_do)
_current: ContextVar[Sandbox | None] = ContextVar("sandbox", default=None)


@contextmanager
def use_sandbox() -> Iterator[Sandbox]:
    """Keeps what runs inside from changing files outside a scratch folder and from reaching other machines."""
    outer = _current.get()
    if outer is not None:
        yield outer
        return
    given = tempfile.gettempdir()  # of a process of its own, which has one for itself
    with (
        nullcontext(given) if Path(given).name.startswith(SCRATCH) else make_scratch() as folder,
        Patches() as patches,
    ):
        box = Sandbox(os.path.realpath(folder))
        token = _current.set(box)
        patches.callback(_current.reset, token)
        _use_scratch_for_temporary_files(patches, box.folder)
        _close_network(patches, box)
        overlay = FileOverlay(box.folder, box.note_deed)
        _divert_native_files(patches, overlay)
        overlay.install_hooks(patches)
        patches.replace_imported_names()
        yield box


def _use_scratch_for_temporary_files(patches: Patches, folder: str) -> None:
    """Temporary files, compiled modules and settings of libraries, as the script and its processes see them."""
    patches.set_attribute(tempfile, "tempdir", folder)
    patches.set_attribute(sys, "dont_write_bytecode", True)
    settings = {**_SETTINGS, "TMPDIR": folder, "PYTHONDONTWRITEBYTECODE": "1"}
    for name, value in settings.items():
        before = os.environ.get(name)
        os.environ[name] = value
        patches.callback(_restore_variable, name, before)


def _restore_variable(name: str, before: str | None) -> None:
    if before is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = before


def _close_network(patches: Patches, box: Sandbox) -> None:
    """Other machines cannot be reached; libraries take what they have on disk."""

    def refuse(host: object) -> OSError:
        box.note_deed("asked the network for", str(host))
        return OSError(
            errno.ENETUNREACH, f"no network in a capture, which {host} is asked for; get what it gives first"
        )

    @patches.wrap(socket, "getaddrinfo", everywhere=True)
    def look_up(resolve: Any, host: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_local(host):
            raise socket.gaierror(socket.EAI_AGAIN, str(refuse(host)))
        return resolve(host, *args, **kwargs)

    @patches.wrap(socket.socket, "connect", "connect_ex")
    def connect(original: Any, self: Any, address: Any) -> Any:
        if isinstance(address, tuple) and not _is_local(address[0]):
            raise refuse(address[0])
        return original(self, address)


def _is_local(host: object) -> bool:
    text = host.decode() if isinstance(host, bytes) else str(host)
    return host is None or not text or text.startswith(_LOCAL) or text == socket.gethostname()


def _divert_native_files(patches: Patches, overlay: FileOverlay) -> None:
    """What opens files outside of Python: PyTorch's and safetensors' writers, Arrow's readers (data sets)."""

    @patches.wrap(torch, "save", everywhere=True)
    def save_object(save: Any, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        save(obj, overlay.find_write_path(f) if isinstance(f, str | os.PathLike) else f, *args, **kwargs)

    def divert_tensors(tensors: Any) -> None:
        @patches.wrap(tensors, "save_file", everywhere=True)
        def save_file(save: Any, tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
            with overlay.open_file(filename, "wb"):
                pass  # tensors without data have none to write

    def divert_arrow(arrow: Any) -> None:
        @patches.wrap(arrow, "memory_map", everywhere=True)
        def memory_map(read: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            return read(overlay.find_read_path(path), *args, **kwargs)

    patches.run_after_import("safetensors.torch", divert_tensors)
    patches.run_after_import("pyarrow", divert_arrow)
