"""Promise: the server answers on this machine only, and to its own pages only."""

from __future__ import annotations

import pytest

from traincast.app.cli.main import main

HOSTS = ("0.0.0.0", "::", "8.8.8.8", "192.168.0.1", "example.org", "", "127.0.0.1.example.org", "\n", "[::]", "10.1")
TRIES = len(HOSTS)
"""Addresses that are not this machine's."""


@pytest.mark.parametrize("host", HOSTS)
def test_no_other_address_is_listened_on(host, capsys):
    assert main(["serve", "--host", host, "--port", "0"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
