"""One server for all tests of the package: the real application with real worker processes, without a socket."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from tests.browsing import browser as browser
from traincast.app.server.guard import UploadLimits
from traincast.app.server.jobs import Limits
from traincast.app.server.server import Settings, make_app

HERE = "http://127.0.0.1:8787"
LIMITS = Limits(quick=1, long=2, waiting=16, quick_seconds=300, long_seconds=300, check_seconds=300)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Where the server puts its own folder of uploads."""
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="session")
def client(folder):
    settings = Settings(limits=LIMITS, uploads=UploadLimits(most_bytes=1 << 20))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(folder))
        app = make_app(settings)
    with TestClient(app, base_url=HERE) as client:
        yield client
    assert list(folder.iterdir()) == [], "uploads end with the server"
