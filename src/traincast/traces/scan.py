"""A JSON document read in pieces: top-level members as they come, one long array in batches of complete elements.

The batches are cut where the text between the first two elements occurs again, which is right for every file that a
program wrote; that the batch then parses proves the cut. Where it does not, brackets are counted instead.
"""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Protocol

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


CHUNK = 1 << 19  # bytes at a time: a few thousand events, which is a good batch for the decoder
MAX_VALUE = 1 << 24  # bytes of one event, node or header member
MAX_DEPTH = 256  # traces nest ten deep; deeper is meant to exhaust a parser
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[{}\[\]"]', re.DOTALL)  # a lone quote opens a string cut off
_SPACE = re.compile(rb"[ \t\r\n]*+")
_BETWEEN = re.compile(rb"[ \t\r\n,]*+")
_SCALAR = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[^\s,\]}"{\[]++', re.DOTALL)
_FIRST_KEY = re.compile(rb'\{\s*"[^"\\]{1,64}"')
_OPEN = (0x7B, 0x5B)


class Sink(Protocol):
    """Takes what the scanner finds."""

    def add_member(self, key: str, raw: bytes) -> None:
        """A top-level member other than the long array."""

    def add_batch(self, raw: bytes) -> bool:
        """A JSON array of elements; False when it does not parse, and then nothing of it may have been kept."""

    def add_single(self, raw: bytes) -> None:
        """One element of a batch that did not parse."""


def scan_file(path: Path, arrays: Collection[str], sink: Sink) -> str:
    """Feeds a file (plain or gzip) to the sink, the elements of the named arrays in batches; says why it ended early
    ("" when it did not)."""
    source = ByteSource(path)
    scanner = Scanner(source, arrays)
    try:
        scanner.scan_document(sink)
    finally:
        source.close()
    return scanner.ended


class IncompleteError(Exception):
    """The value goes on behind the bytes at hand."""


class NestedError(Exception):
    """The value is nested deeper than any trace's."""


class Scanner:
    """Reads one document. `ended` says why it ended early ("" when it did not)."""

    def __init__(self, source: ByteSource, arrays: Collection[str]) -> None:
        self._source, self._arrays = source, arrays
        self._buffer, self._at, self._consumed = b"", 0, 0
        self._mark = b""
        self._more = True
        self.ended = ""

    def scan_document(self, sink: Sink) -> None:
        """Feeds the whole document to the sink."""
        try:
            self._scan_document(sink)
        except NestedError:
            raise TraincastError(
                f"'{self._source.path}' has values nested more than {MAX_DEPTH} deep; a trace has none"
            ) from None
        self.ended = self.ended or self._source.damaged

    def _scan_document(self, sink: Sink) -> None:
        first = self._peek_byte()
        check_encoding(self._buffer, self._source.path)
        if self._buffer.startswith(b"\xef\xbb\xbf"):
            self._at = 3
            first = self._peek_byte()
        if first == b"[":
            self._at += 1
            self._scan_elements(sink)
        elif first == b"{":
            self._at += 1
            self._scan_members(sink)
        else:
            raise TraincastError(f"'{self._source.path}' is not a trace: it is {'not JSON' if first else 'empty'}")

    def _scan_members(self, sink: Sink) -> None:
        seen: set[str] = set()
        while True:
            following = self._peek_byte()
            if following == b",":
                self._at += 1
                continue
            if following != b'"':
                if following != b"}":
                    self._stop_early("no closing brace" if not following else "something that is not JSON")
                return None
            key = self._read_value()
            if key is None or self._peek_byte() != b":":
                return self._stop_early("a member without a value")
            self._at += 1
            name = key[1:-1].decode("utf-8", "replace")
            if name in self._arrays and self._peek_byte() == b"[":
                if name in seen:
                    raise TraincastError(f"'{self._source.path}' has '{name}' twice; keep one of them")
                seen.add(name)
                self._at += 1
                if not self._scan_elements(sink):
                    return None
            else:
                raw = self._read_value()
                if raw is None:
                    return self._stop_early(f"an unfinished member '{name[:40]}'")
                sink.add_member(name, raw)

    def _scan_elements(self, sink: Sink) -> bool:
        """The elements of an array; False when the document ends inside it."""
        while True:
            cut = self._buffer.rfind(self._mark, self._at) + 1 if self._mark else 0
            if cut > self._at and sink.add_batch(_make_array(self._buffer, self._at, cut)):
                self._at = _find_match_end(_BETWEEN, self._buffer, cut)
            else:
                learning = not self._mark
                spans, closed = self._find_spans()
                self._pass_elements(sink, spans)
                if closed:
                    return True
                if learning and self._mark:
                    continue
                if not spans and not self._more:
                    self._stop_early("an unfinished array")
                    return False
            self._fill_buffer()

    def _find_spans(self) -> tuple[list[tuple[int, int]], bool]:
        """Complete elements in the buffer by counting brackets, and whether the array closes behind them."""
        spans: list[tuple[int, int]] = []
        buffer = self._buffer
        while True:
            start = self._at = _find_match_end(_BETWEEN, buffer, self._at)
            if start >= len(buffer):
                return spans, False
            if buffer[start] == 0x5D:
                self._at = start + 1
                return spans, True
            try:
                end = _find_value_end(buffer, start, final=not self._more)
            except IncompleteError:
                self._check_size()
                return spans, False
            if end == start:
                self._at = len(buffer)
                self._more = False
                return spans, False
            spans.append((start, end))
            self._at = _find_match_end(_BETWEEN, buffer, end)
            if not self._mark:
                self._mark = _find_separator(buffer, end)
                if self._mark:
                    return spans, False

    def _pass_elements(self, sink: Sink, spans: list[tuple[int, int]]) -> None:
        if spans and not sink.add_batch(_make_array(self._buffer, spans[0][0], spans[-1][1])):
            for start, end in spans:
                sink.add_single(self._buffer[start:end])

    def _read_value(self) -> bytes | None:
        """The complete value at hand, or None when the document ends in it."""
        while True:
            if self._peek_byte():
                try:
                    end = _find_value_end(self._buffer, self._at, final=not self._more)
                    raw = self._buffer[self._at : end]
                    self._at = end
                    return raw or None
                except IncompleteError:
                    self._check_size()
            if not self._fill_buffer():
                return None

    def _peek_byte(self) -> bytes:
        """The next byte that is not white space, which stays unread; empty at the end."""
        while True:
            self._at = _find_match_end(_SPACE, self._buffer, self._at)
            if self._at < len(self._buffer):
                return self._buffer[self._at : self._at + 1]
            if not self._fill_buffer():
                return b""

    def _fill_buffer(self) -> bool:
        # as much again as is waiting, so that a long value is not looked at over and over
        data = self._source.read(max(CHUNK, len(self._buffer) - self._at))
        self._more = bool(data)
        self._consumed += self._at
        self._buffer = self._buffer[self._at :] + data
        self._at = 0
        return self._more

    def _check_size(self) -> None:
        if len(self._buffer) - self._at > MAX_VALUE:
            raise TraincastError(
                f"'{self._source.path}' has a single value of more than {MAX_VALUE >> 20} MB at byte "
                f"{self._consumed + self._at}; a trace has none"
            )

    def _stop_early(self, what: str) -> None:
        self.ended = f"{what} at byte {self._consumed + self._at}"


def _make_array(buffer: bytes, start: int, end: int) -> bytes:
    return b"".join((b"[", memoryview(buffer)[start:end], b"]"))


def _find_match_end(pattern: re.Pattern[bytes], buffer: bytes, at: int) -> int:
    match = pattern.match(buffer, at)
    return match.end() if match else at


def _find_separator(buffer: bytes, end: int) -> bytes:
    """The text from the closing brace of an element to the first key of the next, or nothing."""
    start = _find_match_end(_BETWEEN, buffer, end)
    match = _FIRST_KEY.match(buffer, start)
    return buffer[end - 1 : match.end()] if match and buffer[end - 1] == 0x7D else b""


def _find_value_end(buffer: bytes, start: int, *, final: bool) -> int:
    """Where the value ends. Raises `IncompleteError` when more bytes could change the result."""
    if buffer[start] not in _OPEN:
        match = _SCALAR.match(buffer, start)
        if match is None and buffer[start] != 0x22:
            return start
        if match is None or (match.end() == len(buffer) and not final):
            raise IncompleteError
        return match.end()
    for depth, end in _iterate_depths(buffer, start):
        if depth == 0:
            return end
        if depth > MAX_DEPTH:
            raise NestedError
    raise IncompleteError


def _iterate_depths(buffer: bytes, start: int) -> Iterator[tuple[int, int]]:
    depth = 0
    for match in _TOKEN.finditer(buffer, start):
        byte = buffer[match.start()]
        if byte in _OPEN:
            depth += 1
        elif byte != 0x22:
            depth -= 1
        elif match.end() == match.start() + 1:
            raise IncompleteError
        yield depth, match.end()
