"""Where the server listens: on this machine and nowhere else."""

from __future__ import annotations

import socket

import pytest

from traincast.app.cli.main import main
from traincast.app.server.guard import is_loopback
from traincast.app.server.server import Settings, bind, serve
from traincast.utils.errors import TraincastError


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("[::1]", True), ("LocalHost.", True),
     ("0.0.0.0", False), ("example.com", False), ("", False), ("127.0.0.1.evil.example", False)],
)  # fmt: skip
def test_only_names_of_this_machine_are_loopback(host, expected):
    assert is_loopback(host) is expected


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.com"])
def test_it_listens_nowhere_else(host):
    with pytest.raises(TraincastError, match=r"on loopback only; give 127.0.0.1 and forward the port"):
        serve(Settings(), host=host, port=0, started=lambda url: pytest.fail(url))


def test_a_port_that_is_taken_is_said_in_a_line():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(TraincastError, match=r"cannot listen on `host` 127.0.0.1"):
            bind("127.0.0.1", other.getsockname()[1])


@pytest.mark.parametrize(
    "options", [["--port", "70000"], ["--workers", "1"], ["--upload-mb", "0"], ["--perfetto", "ftp://x"]]
)
def test_options_out_of_range_are_refused(options, capsys):
    assert main(["serve", *options]) == 2
    assert options[0].strip("-").replace("-", "_")[:6] in capsys.readouterr().err.replace("-", "_")
