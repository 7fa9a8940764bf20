"""Uploads are bounded in size and time, and are nowhere but in their folder."""

from __future__ import annotations

import asyncio

import pytest

from traincast.app.server.guard import Rejection, UploadLimits, Uploads
from traincast.app.server.server import _Routes


async def pieces(*chunks, wait=0.0):
    for chunk in chunks:
        await asyncio.sleep(wait)
        yield chunk


def receive(uploads, name, *chunks, wait=0.0):
    return asyncio.run(uploads.receive(name, pieces(*chunks, wait=wait)))


def files_in(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_file_is_kept_under_the_plain_characters_of_its_name(tmp_path):
    uploads = Uploads(tmp_path, UploadLimits())

    key = receive(uploads, "../../my run.json", b"{", b"}")

    assert uploads.path(key) == tmp_path / key / "my_run.json"
    assert uploads.path(key).read_bytes() == b"{}"
    assert uploads.describe(key, kind="trace") | {"made": 0} == {
        "id": key, "name": "../../my run.json", "bytes": 2, "made": 0, "kind": "trace",
    }  # fmt: skip


def test_the_same_file_again_changes_nothing(tmp_path):
    uploads = Uploads(tmp_path, UploadLimits())

    keys = {receive(uploads, "a.json", b"{}") for _ in range(2)}

    assert len(keys) == 1 and len(uploads.list()) == 1
    assert receive(uploads, "b.json", b"{}") not in keys, "a name is part of a file"


@pytest.mark.parametrize(
    ("limits", "chunks", "status"),
    [
        (UploadLimits(most_bytes=3), [b"ab", b"cd"], 413),
        (UploadLimits(total_bytes=3), [b"abcd"], 413),
        (UploadLimits(seconds=0.05), [b"a"] * 20, 408),
        (UploadLimits(), [], 422),
    ],
)
def test_what_is_too_large_too_slow_or_empty_leaves_nothing(tmp_path, limits, chunks, status):
    with pytest.raises(Rejection) as refused:
        receive(Uploads(tmp_path, limits), "a.json", *chunks, wait=0.02)

    assert refused.value.status == status
    assert files_in(tmp_path) == []


def test_all_together_are_bounded(tmp_path):
    uploads = Uploads(tmp_path, UploadLimits(total_bytes=5))
    first = receive(uploads, "a.json", b"abc")

    with pytest.raises(Rejection, match="larger than"):
        receive(uploads, "b.json", b"abc")
    uploads.forget(first)

    assert receive(uploads, "b.json", b"abc"), "what was removed makes room"


@pytest.mark.parametrize(("name", "status"), [("", 422), ("x" * 200 + ".json", 422), ("a\nb.json", 422), ("a.py", 415)])
def test_names_that_no_file_should_have_are_refused(tmp_path, name, status):
    with pytest.raises(Rejection) as refused:
        receive(Uploads(tmp_path, UploadLimits()), name, b"{}")
    assert refused.value.status == status


def test_what_is_not_there_cannot_be_removed(tmp_path):
    uploads = Uploads(tmp_path, UploadLimits())
    key = receive(uploads, "a.json", b"{}")
    uploads.forget(key)

    for lost in (key, "../a", ""):
        with pytest.raises(Rejection, match="no such upload"):
            uploads.forget(lost)
    assert files_in(tmp_path) == []


def test_an_accepted_file_outlives_a_second_upload_that_finds_no_place_to_be_checked(tmp_path):
    async def ask() -> list[int]:
        uploads = Uploads(tmp_path, UploadLimits())
        routes = _Routes(_FullQueue(), uploads, "")
        key = await uploads.receive("a.json", pieces(b"{}"))
        uploads.describe(key, kind="trace")
        assert await uploads.receive("a.json", pieces(b"{}")) == key
        other = await uploads.receive("b.json", pieces(b"{}"))
        with pytest.raises(Rejection):
            await routes._check_upload(other)
        return [one["id"] == key for one in uploads.list()]

    assert asyncio.run(ask()) == [True], "the file that was never checked is gone, the accepted one is not"


class _FullQueue:
    """Jobs of a server whose queue is full."""

    async def check(self, path):
        raise Rejection(429, "too many questions are waiting; ask again in a few seconds")
