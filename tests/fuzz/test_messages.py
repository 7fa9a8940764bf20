"""Changed protobuf: sound messages come back as they were, changed ones keep their framing."""

from __future__ import annotations

import random

from tests.fuzz.messages import encoded, fields, messages, mutated_messages
from tests.traces.damaged import chakra_bytes


def test_decoding_and_encoding_gives_the_same_bytes():
    pieces = messages(chakra_bytes())
    assert len(pieces) == 9  # a header and eight nodes
    assert fields(pieces[2]) == [(1, 0, 2), (2, 2, b"op2"), (3, 0, 4), (5, 2, b"\x01")]
    assert [encoded(fields(piece)) for piece in pieces] == pieces


def test_changed_files_keep_their_framing_and_differ_by_seed():
    data = chakra_bytes()
    changed = [mutated_messages(data, random.Random(seed)) for seed in range(40)]
    assert len(set(changed)) > 30
    assert changed[3] == mutated_messages(data, random.Random(3))
    for one in changed:
        assert sum(len(piece) for piece in messages(one)) < len(one)
