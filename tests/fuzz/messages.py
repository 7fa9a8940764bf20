"""Changes to length-delimited protobuf (Chakra traces) that keep its framing: some fields are odd."""

from __future__ import annotations

import random

from tests.fuzz.documents import ODD_NUMBERS, ODD_TEXTS

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
_WIDTH = {FIXED64: 8, FIXED32: 4}
Field = tuple[int, int, int | bytes]  # number, wire type, value


def varint(value: int) -> bytes:
    """An integer as protobuf writes it; negative ones as 64 bits."""
    value %= 1 << 64
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at a place, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def messages(data: bytes) -> list[bytes]:
    """The messages of a file."""
    at, pieces = 0, []
    while at < len(data):
        size, at = read_varint(data, at)
        pieces.append(data[at : at + size])
        at += size
    return pieces


def fields(message: bytes) -> list[Field]:
    """The fields of a sound message."""
    at, decoded = 0, []
    while at < len(message):
        key, at = read_varint(message, at)
        number, kind = key >> 3, key & 7
        value: int | bytes
        if kind == VARINT:
            value, at = read_varint(message, at)
        else:
            size, at = read_varint(message, at) if kind == BYTES else (_WIDTH[kind], at)
            value, at = message[at : at + size], at + size
        decoded.append((number, kind, value))
    return decoded


def encoded(decoded: list[Field]) -> bytes:
    """Fields as bytes again."""
    out = b""
    for number, kind, value in decoded:
        body = varint(value) if isinstance(value, int) else (varint(len(value)) if kind == BYTES else b"") + value
        out += varint(number << 3 | kind) + body
    return out


def mutated_messages(data: bytes, rng: random.Random) -> bytes:
    """A file with one to four odd fields in its messages, or messages left out, repeated or in another order."""
    pieces = messages(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        place = rng.randrange(len(pieces))
        change = rng.random()
        if change < 0.8:
            pieces[place] = _odd(pieces[place], rng)
        elif change < 0.9:
            pieces.insert(rng.randrange(len(pieces) + 1), pieces[place])
        elif len(pieces) > 1:
            del pieces[place]
    return b"".join(varint(len(piece)) + piece for piece in pieces)


def _odd(message: bytes, rng: random.Random) -> bytes:
    decoded = fields(message)
    if not decoded:
        return message
    place = rng.randrange(len(decoded))
    number, kind, value = decoded[place]
    change = rng.random()
    if change < 0.1:
        del decoded[place]
    elif change < 0.2:
        decoded.insert(place, decoded[rng.randrange(len(decoded))])
    elif change < 0.3:
        decoded[place] = (rng.randrange(1, 32), kind, value)
    elif isinstance(value, int):
        whole = [odd for odd in ODD_NUMBERS if isinstance(odd, int)]
        decoded[place] = (number, kind, rng.choice((value + 1, value - 1, *whole)))
    else:
        decoded[place] = (number, kind, _odd_bytes(kind, value, rng))
    return encoded(decoded)


def _odd_bytes(kind: int, value: bytes, rng: random.Random) -> bytes:
    """Other bytes in a field: as a message of its own where they decode as one, else a text or an array."""
    if kind != BYTES:
        return rng.choice((bytes(len(value)), b"\xff" * len(value), b"\x7f" * len(value)))
    if rng.random() < 0.6:
        try:
            return _odd(value, rng)
        except (IndexError, KeyError):  # a text, or packed numbers
            pass
    return rng.choice((b"", value * 2, value[:-1], *(text.encode("utf-8", "surrogatepass") for text in ODD_TEXTS)))
