"""Around a captured script: its writes go to a scratch folder, the network is closed, and both are told."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from traincast.capturing.file_overlay import FileOverlay
from traincast.capturing.patches import Patches
from traincast.ir.workload import KEPT_BACK
from traincast.utils.parallel.apart import SCRATCH, make_scratch

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
