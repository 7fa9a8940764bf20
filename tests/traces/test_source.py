"""Bytes of plain and packed files, a piece at a time, whatever stands behind the data."""

from __future__ import annotations

import bz2
import gzip
import lzma
import random
import tarfile
import zipfile

import pytest

from traincast.traces.kineto import read_kineto
from traincast.traces.scan import ByteSource
from traincast.utils.errors import TraincastError

TEXT = random.Random(1).randbytes(100_000).hex().encode()


def read_all(path, size=1000):
    source = ByteSource(path)
    pieces = []
    while piece := source.read(size):
        assert len(piece) <= size
        pieces.append(piece)
        assert len(pieces) < 10_000, "it never ends"
    source.close()
    return b"".join(pieces), source.damaged


@pytest.mark.parametrize("size", [1, 1000, 1 << 20])
def test_several_gzip_members_are_one_text(tmp_path, size):
    text = TEXT[:5000] if size == 1 else TEXT
    half = len(text) // 2
    (tmp_path / "t.gz").write_bytes(gzip.compress(text[:half]) + gzip.compress(b"") + gzip.compress(text[half:]))
    assert read_all(tmp_path / "t.gz", size) == (text, "")


@pytest.mark.parametrize("behind", [b"\0" * 600_000, b"\x1f", b"rubbish" * 100_000, b"\x1f\x8b"])
@pytest.mark.parametrize("size", [100, 1 << 20])
def test_what_stands_behind_the_last_member_is_not_data_and_ends(tmp_path, behind, size):
    (tmp_path / "t.gz").write_bytes(gzip.compress(TEXT) + behind)
    text, damaged = read_all(tmp_path / "t.gz", size)
    assert text == TEXT
    assert damaged == ("the gzip stream is cut off" if behind == b"\x1f\x8b" else "")


def test_too_many_members_are_refused(tmp_path):
    (tmp_path / "t.gz").write_bytes(gzip.compress(b"") * 10_001)
    with pytest.raises(TraincastError, match="more than 10000 gzip members"):
        read_all(tmp_path / "t.gz")


@pytest.mark.parametrize("cut", [10, 1000, 100_000])
def test_a_cut_file_says_so(tmp_path, cut):
    packed = gzip.compress(TEXT)
    (tmp_path / "t.gz").write_bytes(packed[:cut])
    text, damaged = read_all(tmp_path / "t.gz")
    assert TEXT.startswith(text)
    assert damaged == "the gzip stream is cut off"


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_the_only_file_of_a_zip_archive_is_read(tmp_path, pack, method):
    with zipfile.ZipFile(tmp_path / "t.zip", "w", method) as archive:
        archive.mkdir("traces")
        archive.writestr("traces/../../t.json", pack(TEXT))
        archive.writestr("__MACOSX/t.json", "of no use")
    assert read_all(tmp_path / "t.zip") == (TEXT, "")


def test_an_archive_of_several_files_or_none_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "t.zip", "w") as archive:
        archive.writestr("a.json", TEXT)
        archive.writestr("b.json", TEXT)
    with pytest.raises(TraincastError, match="archive of 2 files; unpack it"):
        ByteSource(tmp_path / "t.zip")


def test_a_damaged_archive_is_said_to_be(tmp_path):
    with zipfile.ZipFile(tmp_path / "t.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.json", TEXT)
    whole = (tmp_path / "t.zip").read_bytes()
    (tmp_path / "t.zip").write_bytes(whole[:90_000] + bytes(1000) + whole[91_000:])
    assert read_all(tmp_path / "t.zip")[1] == "the zip archive is corrupt"
    (tmp_path / "t.zip").write_bytes(whole[:50_000])
    with pytest.raises(TraincastError, match="zip archive that cannot be read"):
        ByteSource(tmp_path / "t.zip")


def test_a_zip_bomb_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "t.zip", "w", zipfile.ZIP_DEFLATED) as archive, archive.open("a.json", "w") as file:
        for _ in range(140):
            file.write(bytes(1 << 20))
    with pytest.raises(TraincastError, match="more than 250 times its size"):
        read_all(tmp_path / "t.zip", 1 << 20)


def archived(folder):
    (folder / "t.json").write_text('{"traceEvents": []}')
    with tarfile.open(folder / "t.tar.gz", "w:gz") as archive:
        archive.add(folder / "t.json", "t.json")
    return (folder / "t.tar.gz").read_bytes()


@pytest.mark.parametrize("packing", ["xz", "bzip2", "zstd", "tar"])
def test_other_ways_to_pack_are_named(tmp_path, packing):
    text = b'{"traceEvents": []}'
    packed = {"xz": lzma.compress, "bzip2": bz2.compress, "zstd": lambda data: b"\x28\xb5\x2f\xfd" + data}
    (tmp_path / "t.json").write_bytes(packed[packing](text) if packing in packed else archived(tmp_path))
    with pytest.raises(TraincastError, match=f"packed with {packing}; unpack it"):
        read_kineto(tmp_path / "t.json")
