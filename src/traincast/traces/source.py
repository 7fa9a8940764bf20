"""Bytes of a trace file, plain, gzip or the only one in a zip archive, a bounded piece at a time."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path

from traincast.utils.errors import TraincastError

_READ = 1 << 18  # bytes at a time; inflated they are a few MB
_GZIP = b"\x1f\x8b"  # how every gzip member begins
_ZIP = b"PK\x03\x04"  # how every zip archive with files in it begins
# deflate packs a real trace 10 to 60 times; beyond this a small file is only meant to fill the machine
_MAX_RATIO, _RATIO_FROM = 250, 1 << 24
_MAX_MEMBERS = 10_000  # a trace appended to in pieces has a few; each one costs a copy of what is left to unpack
_ENCODINGS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x00\x00": "UTF-32"}
_PACKED = {
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zX": "xz",
    b"BZh": "bzip2",
    b"7z\xbc\xaf": "7z",
    b"\x04\x22\x4d\x18": "lz4",
}
_TAR_AT, _TAR = 257, b"ustar"  # where and how a tar archive says that it is one


class ByteSource:
    """Reads a file front to back; `damaged` says why it ended early ("" when it did not)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = ""
        self._file: io.BufferedReader | zipfile.ZipExtFile = _open_file(path)
        self._zipped = 0  # bytes that a zip archive needs for the file; 0 for none
        if self._file.peek(4)[:4] == _ZIP:
            self._file, self._zipped = _find_only_member(path, self._file)
        self._gzip = self._file.peek(2)[:2] == _GZIP
        self._inflate = zlib.decompressobj(wbits=31)
        self._packed, self._unpacked, self._members = 0, 0, 1

    def read(self, size: int) -> bytes:
        """The next bytes, at most `size` of them; empty only at the end."""
        try:
            return self._read_gzip(size) if self._gzip else self._read_plain(size)
        except OSError as error:
            raise TraincastError(f"cannot read '{self.path}': {error.strerror}") from None
        except (zipfile.BadZipFile, zlib.error, EOFError):
            self.damaged = "the zip archive is corrupt"
            return b""

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _read_plain(self, size: int) -> bytes:
        data = self._file.read(size) if not self.damaged else b""
        if self._zipped:
            self._unpacked += len(data)
            self._check_ratio(self._zipped)
        return data

    def _check_ratio(self, packed: int) -> None:
        if self._unpacked > _RATIO_FROM and self._unpacked > _MAX_RATIO * packed:
            raise TraincastError(
                f"'{self.path}' unpacks to more than {_MAX_RATIO} times its size; unpack it yourself if it is sound"
            )

    def _read_gzip(self, size: int) -> bytes:
        while not self.damaged:
            packed = self._open_next_member() if self._inflate.eof else self._inflate.unconsumed_tail
            if not packed and not self._inflate.eof:
                packed = self._file.read(_READ)
                self._packed += len(packed)
            if not packed:
                if not self._inflate.eof:
                    self.damaged = "the gzip stream is cut off"
                return b""
            try:
                data = self._inflate.decompress(packed, size)
            except zlib.error:
                self.damaged = "the gzip stream is corrupt"
                return b""
            self._unpacked += len(data)
            self._check_ratio(self._packed)
            if data:
                return data
        return b""

    def _open_next_member(self) -> bytes:
        """The start of a further gzip member; zero padding and other rubbish behind the last one is not data."""
        rest = self._inflate.unused_data
        if len(rest) < len(_GZIP):
            further = self._file.read(_READ)
            self._packed += len(further)
            rest += further
        if not rest.startswith(_GZIP):
            return b""
        self._members += 1
        if self._members > _MAX_MEMBERS:
            raise TraincastError(f"'{self.path}' has more than {_MAX_MEMBERS} gzip members; pack it again as one")
        self._inflate = zlib.decompressobj(wbits=31)
        return rest


def _open_file(path: Path) -> io.BufferedReader:
    try:
        if path.is_dir():
            raise TraincastError(f"'{path}' is a folder; a trace file was expected")
        if path.exists() and not path.is_file():
            raise TraincastError(f"'{path}' is not a regular file")
        return path.open("rb")
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        if isinstance(error, TraincastError):
            raise
        reason = error.strerror if isinstance(error, OSError) else "no valid file name"
        raise TraincastError(f"cannot read '{path}': {reason}") from None


def _find_only_member(path: Path, archive: io.BufferedReader) -> tuple[zipfile.ZipExtFile, int]:
    """The only file in a zip archive, and how many bytes it takes there."""
    try:
        packed = zipfile.ZipFile(archive)
        files = [entry for entry in packed.infolist() if not entry.is_dir() and "__MACOSX" not in entry.filename]
        if len(files) != 1:
            raise TraincastError(f"'{path}' is an archive of {len(files)} files; unpack it and give the folder")
        member = packed.open(files[0])
        assert isinstance(member, zipfile.ZipExtFile)
        member.peek(1)  # what is wrong with its begin shows now
        return member, max(files[0].compress_size, 1)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, OSError):
        raise TraincastError(f"'{path}' is a zip archive that cannot be read; unpack it and give the file") from None


def check_encoding(start: bytes, path: Path) -> None:
    """Rejects the encodings that JSON is not written in, and what is packed in other ways than gzip and zip."""
    packed = next((name for magic, name in _PACKED.items() if start.startswith(magic)), "")
    packed = packed or ("tar" if start[_TAR_AT:].startswith(_TAR) else "")
    if packed:
        raise TraincastError(f"'{path}' is packed with {packed}; unpack it and give the file")
    wrong = _ENCODINGS.get(start[:2]) or ("UTF-16" if b"\x00" in start[:4] else "")
    if wrong:
        raise TraincastError(f"'{path}' looks like {wrong}; a trace is JSON in UTF-8")
