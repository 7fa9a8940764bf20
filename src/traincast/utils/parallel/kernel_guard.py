"""Limits that Linux puts on a process and on what it starts: files it may not change, machines it cannot reach.

Code that no Python function of ours sees (C++, Rust, child processes) is held by them too. Where the kernel has none of
it, the functions say so.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

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
