"""Files are written whole or not at all: aside under a name nobody has, flushed to the disk, then put in place."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import format_path

_NAME_PART = 40  # characters of the file's name in that of its draft: at most 160 bytes of the 255 a name may have
_STALE_SECONDS = 60  # between making a draft and locking it pass microseconds


def check_output(path: str | Path, *, inputs: Iterable[str | Path] = ()) -> Path:
    """The path, when a file can be put there: not an input, and nothing but a regular file is there already."""
    where = format_path(path)
    if not str(path):
        raise TraincastError("cannot write to '': give the path of a file")
    target = Path(path)
    try:
        state = target.lstat()
    except FileNotFoundError:
        state = None
    except (OSError, ValueError) as error:
        raise TraincastError(f"cannot write '{where}': {getattr(error, 'strerror', None) or 'not a path'}") from None
    if state is not None and not stat.S_ISREG(state.st_mode):
        kind = "a folder" if stat.S_ISDIR(state.st_mode) else "no regular file"
        raise TraincastError(f"cannot write '{where}': it is {kind}; give the path of a file")
    if state is not None and any(_is_file(source, state) for source in inputs):
        raise TraincastError(f"cannot write '{where}': it is also read; give another path")
    if not target.parent.is_dir():
        raise TraincastError(f"cannot write '{where}': there is no folder '{format_path(target.parent)}'")
    return target


def _is_file(source: str | Path, state: os.stat_result) -> bool:
    """Whether a path names the file of this state; what no file can be called names none."""
    try:
        return os.path.samestat(state, Path(source).stat())
    except (OSError, ValueError):
        return False


@contextmanager
def replace_file(path: str | Path, *, inputs: Iterable[str | Path] = ()) -> Iterator[IO[bytes]]:
    """A binary file to write to; it takes the place of `path` when the block ends well, else it vanishes."""
    target = check_output(path, inputs=inputs)
    _remove_stale(target)
    # named before it is made, so that an interrupt at any moment still removes it
    draft = target.with_name(f".{target.name[:_NAME_PART]}.{secrets.token_hex(8)}.tmp")
    try:
        number = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(number, "wb") as file:
            with suppress(OSError):  # some file systems cannot; then the draft of a killed process stays
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(number, _choose_permissions(target))
            yield file
            file.flush()
            os.fsync(number)
        draft.replace(target)
        _flush_folder(target.parent)
    except OSError as error:
        raise TraincastError(f"cannot write '{format_path(path)}': {error.strerror or error}") from None
    finally:
        with suppress(OSError):  # in place by now, or never made
            draft.unlink()


def _remove_stale(target: Path) -> None:
    """Removes drafts of this file whose writers were killed: old enough to be locked by now, and locked by nobody."""
    draft = re.compile(re.escape(f".{target.name[:_NAME_PART]}.") + r"[0-9a-f]{16}\.tmp")
    with suppress(OSError):
        for entry in os.scandir(target.parent):
            if not draft.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
                continue
            if time.time() - entry.stat(follow_symlinks=False).st_mtime > _STALE_SECONDS:
                _remove_unlocked(Path(entry.path))


def _remove_unlocked(draft: Path) -> None:
    with suppress(OSError):
        number = os.open(draft, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a living writer holds it
            draft.unlink()
        finally:
            os.close(number)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keeps others that lock this folder waiting, where its file system can: to read a file and to replace it."""
    with ExitStack() as stack:
        with suppress(OSError):
            number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, number)
            fcntl.flock(number, fcntl.LOCK_EX)
        yield


def write_bytes(path: str | Path, data: bytes, *, inputs: Iterable[str | Path] = ()) -> None:
    """A file with these bytes, whole or not at all."""
    with replace_file(path, inputs=inputs) as file:
        file.write(data)


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Several files, all or none: every one is on the disk under a name of its own before the first is put in place."""
    with _defer_signals() as wait, ExitStack() as stack:
        drafts = [(stack.enter_context(replace_file(path)), data) for path, data in contents.items()]
        for file, data in drafts:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        wait()  # from here on files are put in place one after the other


@contextmanager
def _defer_signals() -> Iterator[Callable[[], None]]:
    """Yields a function after whose call Ctrl-C and the like wait until the block ends.

    Blocking them would hold them off this thread only, and any other may take them.
    """
    came: list[int] = []
    handlers: dict[int, Any] = {}

    def wait() -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python handles signals in the main one
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if callable(signal.getsignal(number)):
                handlers[number] = signal.signal(number, lambda number, _: came.append(number))

    try:
        yield wait
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def write_json(path: str | Path, document: Any, *, inputs: Iterable[str | Path] = ()) -> None:
    """A compact JSON file, whole or not at all; numbers that are not finite are rejected."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)  # at once: ten times as fast as block by block
    with replace_file(path, inputs=inputs) as file:
        file.write(text.encode("ascii"))


def _choose_permissions(target: Path) -> int:
    """Those of the file that is there, else what the user's mask leaves of read and write for all."""
    with suppress(OSError):
        return stat.S_IMODE(target.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _flush_folder(folder: Path) -> None:
    with suppress(OSError):  # some file systems cannot; the file itself is on the disk
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
