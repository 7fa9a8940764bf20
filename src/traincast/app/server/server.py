"""The server itself: the socket, the address that it prints, and its end by a signal."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from traincast.app.server.app import Settings, make_app
from traincast.app.server.guard import is_loopback
from traincast.utils.errors import TraincastError

_BACKLOG = 32  # connections that wait, and that are taken at once before any is looked at
_HEADER_SECONDS = 10.0  # a request's first line and headers may take
_MOST_CONNECTIONS = 512
_MOST_HEADER = 1 << 15  # bytes of a request's first line and headers


class _Server(uvicorn.Server):
    """uvicorn's server, which ends in peace when it is told to: it does not raise the signal again."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Ctrl-C and SIGTERM let requests that run come to their end, then the server ends."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Protocol(H11Protocol):
    """uvicorn's protocol, which drops connections that send no whole header: soon, or once files are short."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes a connection. Each one is an open file: of too many, the one that has kept its header longest goes."""
        super().connection_made(transport)
        self._watch_header()
        held = [one for one in self.connections if isinstance(one, _Protocol) and not one.transport.is_closing()]
        if len(held) > min(_MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 3):
            owed = {one: one._deadline.when() for one in held if one._deadline is not None}
            min(owed, key=owed.__getitem__).transport.abort()  # this one where no other keeps its header

    def data_received(self, data: bytes) -> None:
        """Takes bytes in; a header that is not whole has to be so soon."""
        super().data_received(data)
        self._watch_header()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the deadline of a connection that ended."""
        self._forget_deadline()
        super().connection_lost(exc)

    def _watch_header(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._forget_deadline()
        elif self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(_HEADER_SECONDS, self.transport.abort)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens there; what the system rejects is said in a line."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)  # from here on connections wait for the application to start
    except (OSError, UnicodeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraincastError(f"cannot listen on `host` {host}, `port` {port}: {reason}; give another") from None
    return listening


def serve(settings: Settings, *, host: str, port: int, started: Callable[[str], None]) -> None:
    """Serves on this machine until a signal comes; `started` is called with the address of the page."""
    if not is_loopback(host):
        raise TraincastError(
            f"`host` {host} is not this machine: the server answers on loopback only; give 127.0.0.1 and forward the "
            "port (ssh -L) to reach it from elsewhere"
        )
    with bind(host, port) as listening:
        shown = f"[{host}]" if ":" in host else host
        config = uvicorn.Config(
            make_app(settings), http=_Protocol, backlog=_BACKLOG, ws="none", loop="asyncio", log_config=None,
            access_log=False, server_header=False, proxy_headers=False, timeout_keep_alive=30,
            timeout_graceful_shutdown=3, h11_max_incomplete_event_size=_MOST_HEADER, lifespan="on",
        )  # fmt: skip
        started(f"http://{shown}:{listening.getsockname()[1]}/")
        _Server(config).run(sockets=[listening])
