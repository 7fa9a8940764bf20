"""One server for all tests of the room: the real application with real worker processes, without a socket."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from tests.browsing import browser as browser
from traincast.app.server.app import Settings, make_app
from traincast.app.server.pool import Limits
from traincast.app.server.store import Room

HERE = "http://127.0.0.1:8787"
LIMITS = Limits(least=2, most=4, waiting=16, quick_seconds=300, long_seconds=300, check_seconds=300)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="session")
def client(folder):
    settings = Settings(folder=folder, limits=LIMITS, room=Room(upload=1 << 20))
    with TestClient(make_app(settings), base_url=HERE) as client:
        yield client


@pytest.fixture
def guarded(tmp_path):
    """A server that needs its token; no worker is started."""
    app = make_app(Settings(folder=tmp_path, token="a-token-of-enough-length"))
    return TestClient(app, base_url="http://example.test", follow_redirects=False)
