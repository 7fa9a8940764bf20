"""Work in a process of its own: bounded, unable to change files or reach other machines; its crash is none here.

Code that no Python function of ours sees (C++, Rust, child processes) is held by them too. Where the kernel has none of
it, the functions say so.

The process is forked, so that it has all that this one has loaded. It tells with texts what it does, leaves files in
its scratch folder, and is killed with all that it started when it has ended. What it prints, programs that it starts
and code outside of Python included, goes to the streams that `sys.stdout` and `sys.stderr` are here.
"""

from __future__ import annotations

import codecs
import ctypes
import fcntl
import json
import multiprocessing.process
import multiprocessing.util
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from traincast.utils.errors import TraincastError

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls of Landlock, the same on all architectures
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_WRITE_RIGHTS = 0b1_1111_1111_0010  # write_file, remove_*, make_*: everything that changes files
_REFER, _TRUNCATE = 1 << 13, 1 << 14  # since versions 2 and 3
_NO_NEW_PRIVILEGES, _DEATH_SIGNAL = 38, 1  # of prctl
_NEW_USER, _NEW_NETWORK = 0x1000_0000, 0x4000_0000  # of unshare
_SET_FLAGS, _UP = 0x8914, 1  # of a network interface


def forbid_writes(folders: Sequence[str]) -> bool:
    """From now on this process and its children change files below these folders alone; False: the kernel cannot."""
    kernel = _load_library()
    version = kernel.syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG) if kernel else -1
    if kernel is None or version < 1:
        return False
    rights = _WRITE_RIGHTS | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    handled = ctypes.create_string_buffer(struct.pack("=Q", rights))
    rules = kernel.syscall(_CREATE_RULESET, handled, ctypes.c_size_t(8), 0)
    if rules < 0:
        return False
    try:
        for folder in folders:
            place = os.open(folder, os.O_PATH | os.O_CLOEXEC)
            beneath = ctypes.create_string_buffer(struct.pack("=Qi", rights, place))
            added = kernel.syscall(_ADD_RULE, rules, _PATH_BENEATH, beneath, 0)
            os.close(place)
            if added:
                return False
        kernel.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        return bool(kernel.syscall(_RESTRICT_SELF, rules, 0) == 0)
    finally:
        os.close(rules)


def leave_network() -> bool:
    """From now on this process and its children reach this machine alone; False: the kernel does not let us."""
    kernel = _load_library()
    if kernel is None:
        return False
    user, group = os.getuid(), os.getgid()
    if kernel.unshare(_NEW_NETWORK):
        if kernel.unshare(_NEW_USER | _NEW_NETWORK):
            return False
        with suppress(OSError):  # the same user as before, inside
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plug:
        fcntl.ioctl(plug, _SET_FLAGS, struct.pack("16sH22x", b"lo", _UP))
    return True


def end_with_parent() -> None:
    """This process is killed when the one that made it ends."""
    kernel = _load_library()
    if kernel is not None:
        kernel.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _load_library() -> ctypes.CDLL | None:
    return ctypes.CDLL(None, use_errno=True) if os.uname().sysname == "Linux" else None


Tell = Callable[[str], None]
_MEMORY_SHARE = 0.9  # of this machine's memory that a process may fill
_LOOK_SECONDS = 0.25
_MOST_FILES = 20_000  # that are compared where the kernel holds nothing back
SCRATCH = "traincast-capture-"
"""How names of scratch folders begin."""
CAN_FORK = hasattr(os, "fork")


@dataclass(frozen=True)
class Ended:
    """How the work ended: `failure` is "" where it did what it was asked; `own` says that the work itself reports it,
    else it was killed. `changed` are files outside the scratch folder that changed."""

    failure: str = ""
    own: bool = False
    changed: tuple[str, ...] = ()


def run_apart(work: Callable[[Tell], None], scratch: str, *, listener: Tell | None, seconds: float) -> Ended:
    """Runs `work` in a process that writes below `scratch` alone, for at most this long; `listener` hears its texts.

    Where the kernel cannot keep it from writing elsewhere, the files of the current folder are compared.
    """
    read, write = os.pipe()
    printed = _Printed()
    _flush_streams()
    guarded = os.path.join(scratch, "unguarded")  # noqa: PTH118
    before = _list_states(Path.cwd())
    child = os.fork()
    if not child:
        try:
            os.close(read)
            printed.replace_streams()
            _work_in_child(work, scratch, write, guarded)
        finally:  # whatever happens: what called this is the other process's to go on with, and to clean up
            os._exit(1)
    os.close(write)
    try:
        failure, own = _follow(child, read, printed, listener, time.monotonic() + seconds, seconds)
    finally:
        _kill_group(child)
        os.close(read)
        printed.close()
    changed = _compare_states(before, _list_states(Path.cwd())) if os.path.exists(guarded) else ()  # noqa: PTH110
    return Ended(failure, own, changed)


class _Printed:
    """What the process prints on its output and error streams, passed on to those of this process."""

    def __init__(self) -> None:
        self._pipes = (os.pipe(), os.pipe())
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in self._pipes]
        self.ends = [read for read, _ in self._pipes]

    def replace_streams(self) -> None:
        """In the process itself: all that it prints goes into the pipes."""
        for number, (_, write) in enumerate(self._pipes, start=1):
            os.dup2(write, number)
        self._close_pipes()
        sys.stdout, sys.stderr = (
            os.fdopen(number, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False) for number in (1, 2)
        )

    def pass_on(self, ready: Sequence[int]) -> None:
        """Passes on what there is in the pipes of `ready`, of each as much as it can hold."""
        for end, decoder, stream in zip(self.ends, self._decoders, (sys.stdout, sys.stderr), strict=True):
            if end in ready and stream is not None:
                known = getattr(stream, "encoding", None) or "utf-8"
                stream.write(decoder.decode(os.read(end, 1 << 16)).encode(known, "replace").decode(known))

    def close(self) -> None:
        """To be called when the process has ended: passes on what is left."""
        self.pass_on(select.select(self.ends, [], [], 0.0)[0])
        self._close_pipes()

    def _close_pipes(self) -> None:
        for end in (end for pipe in self._pipes for end in pipe):
            os.close(end)


def _flush_streams() -> None:
    """Whatever the streams are by now: code that was run may have closed them, or put others in their place."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _work_in_child(work: Callable[[Tell], None], scratch: str, write: int, unguarded: str) -> None:
    """Never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        end_with_parent()
        multiprocessing.process._children.clear()  # type: ignore[attr-defined]  # not of this process: it ends its own
        multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        tempfile.tempdir = scratch
        leave_network()
        if not forbid_writes([scratch, "/dev", "/proc"]):
            Path(unguarded).touch()
        if "torch" in sys.modules:  # its threads did not come along, and OpenMP would wait for them
            sys.modules["torch"].set_num_threads(1)
        work(lambda text: _send(write, text=text))
        _send(write, done=True)
        code = 0
    except TraincastError as error:
        _send(write, error=str(error))
    except BaseException:
        _send(write, bug=traceback.format_exc())
    finally:
        _flush_streams()
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # ends what the work has started
        os._exit(code)


def _send(write: int, **message: object) -> None:
    """Sends a message, after all that was printed before it."""
    _flush_streams()
    os.write(write, json.dumps(message).encode() + b"\n")


def _follow(
    child: int, read: int, printed: _Printed, listener: Tell | None, until: float, seconds: float
) -> tuple[str, bool]:
    """What the process reports until it ends: why it failed (of a crash, where it said last that it was), and whether
    it says so itself."""
    most = _MEMORY_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    pending, done, reported, last = b"", False, "", ""
    while True:
        ready = select.select([read, *printed.ends], [], [], _LOOK_SECONDS)[0]
        printed.pass_on(ready)
        if read in ready:
            got = os.read(read, 1 << 16)
            *lines, pending = (pending + got).split(b"\n")
            for message in map(json.loads, lines):
                done = done or bool(message.get("done"))
                reported = reported or message.get("error", "")
                if "bug" in message:
                    raise RuntimeError(message["bug"])
                if "text" in message:
                    last = f" ({message['text']})"
                    if listener is not None:
                        listener(message["text"])
            if not got or done or reported:
                break
        if time.monotonic() > until:
            return f"it was not done after {seconds:g} s", False
        if _measure_memory(child) > most:
            return f"it filled more than {most / 1e9:.0f} GB of memory", False
    if done or reported:
        return reported, True
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    name = signal.Signals(-status).name if status < 0 else f"exit code {status}"
    return f"its process ended with {name}, a crash outside of Python{last}", False


def _measure_memory(process: int) -> float:
    """Bytes that a process fills; 0 where the system does not say."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * float(os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError, IndexError):
        return 0.0


def _kill_group(child: int) -> None:
    """Ends the process and all that it has started."""
    try:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    except (ProcessLookupError, ChildProcessError, PermissionError):
        return


def _list_states(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of the files below a folder, of the first ones where there are many."""
    found: dict[str, tuple[int, int]] = {}
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                state = os.lstat(os.path.join(path, name))  # noqa: PTH118
            except OSError:
                continue
            found[os.path.join(path, name)] = (state.st_size, state.st_mtime_ns)  # noqa: PTH118
            if len(found) >= _MOST_FILES:
                return found
    return found


def _compare_states(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> tuple[str, ...]:
    return tuple(path for path in sorted({*before, *after}) if before.get(path) != after.get(path))


def make_scratch() -> tempfile.TemporaryDirectory[str]:
    """A scratch folder that goes when it is closed."""
    return tempfile.TemporaryDirectory(prefix=SCRATCH, ignore_cleanup_errors=True)
