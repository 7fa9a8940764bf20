"""Promise: clients that send half a header keep nobody else waiting, and fill no log."""

from __future__ import annotations

import http.client
import re
import resource
import socket
import subprocess
import sys

HALF = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
FILES, CLIENTS = 96, 120
TRIES = CLIENTS
"""Clients; `tests/app/server/siege.py` has the others, for as long as asked."""


def test_half_headers_of_more_clients_than_files_do_not_stop_the_server():
    serve = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES}, {FILES}))\n"
    serve += "from traincast.app.cli.main import main; raise SystemExit(main(['serve', '--port', '0']))"
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 2 * CLIENTS
    server = subprocess.Popen([sys.executable, "-c", serve], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    clients: list[socket.socket] = []
    try:
        port = int(re.search(r"127\.0\.0\.1:(\d+)", _read_address(server))[1])  # type: ignore[index]
        for _ in range(CLIENTS):
            client = socket.create_connection(("127.0.0.1", port), timeout=60)
            client.sendall(HALF)
            clients.append(client)
        assert _ask(port) == 200
    finally:
        for client in clients:
            client.close()
        server.terminate()
        _, err = server.communicate(timeout=60)
    assert len(err) < 2000, err[-2000:]


def _ask(port: int) -> int:
    """The status of the page, of the first connection."""
    asked = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    asked.request("GET", "/")
    return asked.getresponse().status


def _read_address(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None and server.stderr is not None
    return server.stdout.readline() or server.stderr.read()
