"""Whatever the bytes, loading gives a valid workload or one `TraincastError` line, quickly and in little memory."""

import io
import json
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ir.steps import make_workload
from traincast.ir import load_workload, save_workload
from traincast.ir.validate import validate_workload
from traincast.utils.errors import TraincastError


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "good.tc"
    save_workload(make_workload(), path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def members(good: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(good)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bad.tc"


def outcome(path: Path, data: bytes) -> str:
    """The error of loading these bytes, or "" when they hold a workload that is valid all through."""
    path.write_bytes(data)
    try:
        workload = load_workload(path)
    except TraincastError as error:
        message = str(error)
        assert "\n" not in message
        assert message.startswith(f"{path}: ")
        assert len(message) < 400 + len(str(path))
        return message.removeprefix(f"{path}: ")
    validate_workload(workload)
    assert all(program.ops is not None and program.scopes is not None for program in workload.programs)
    return ""


def zipped(members: dict[str, bytes], **replaced: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**members, **replaced}.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def test_a_truncated_file_is_refused_wherever_it_ends(good: bytes, path: Path) -> None:
    for end in [*range(0, len(good), 7), *range(len(good) - 30, len(good))]:
        assert outcome(path, good[:end])


def test_a_flipped_byte_is_refused_or_harmless(good: bytes, path: Path) -> None:
    harmless = sum(
        not outcome(path, good[:i] + bytes([good[i] ^ 0x55]) + good[i + 1 :]) for i in range(0, len(good), 5)
    )
    assert harmless < len(good) / 5 / 4  # dates, attributes and the like


@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(edits=st.lists(st.tuples(st.integers(0, 1 << 20), st.binary(max_size=6), st.integers(0, 40)), max_size=5))
def test_random_damage(good: bytes, path: Path, edits: list[tuple[int, bytes, int]]) -> None:
    data = good
    for place, inserted, removed in edits:
        start = place % len(data) if data else 0
        data = data[:start] + inserted + data[start + removed :]
    outcome(path, data)


@given(data=st.binary(max_size=200), magic=st.booleans())
@settings(deadline=None, suppress_health_check=list(HealthCheck))
def test_random_bytes(path: Path, data: bytes, magic: bool) -> None:
    assert outcome(path, b"PK\x03\x04" + data if magic else data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not a Traincast workload file (not a zip)"),
        (b"hello", "is not a Traincast workload file (not a zip)"),
        (b"PK\x03\x04" + b"0" * 100, "is cut short or damaged: it does not end like a zip"),
        (b"PK\x03\x04" + b"PK\x05\x06" + b"\xff" * 18, "has a zip directory of more than 4 MiB"),
    ],
)
def test_what_is_no_zip_is_named(path: Path, data: bytes, message: str) -> None:
    assert outcome(path, data) == message


def test_a_newer_format_asks_for_an_upgrade(members: dict[str, bytes], path: Path) -> None:
    head = {**json.loads(members["workload.json"]), "version": 3}
    message = outcome(path, zipped({**members, "workload.json": json.dumps(head).encode()}))
    assert message == "written by a newer Traincast (format 3); this one reads up to 2: upgrade"


def test_a_newer_format_is_named_even_when_nothing_else_is_known(path: Path) -> None:
    head = {"format": "traincast-workload", "version": 3, "new": True}
    assert "upgrade" in outcome(path, zipped({"workload.json": json.dumps(head).encode(), "other.bin": b"x"}))


def test_another_zip_is_no_workload(path: Path) -> None:
    assert outcome(path, zipped({"a.txt": b"hello"})) == "member 'workload.json' is missing"
    assert "its format is None" in outcome(path, zipped({"workload.json": b"{}"}))


def test_members_that_are_missing_double_or_strange_are_named(members: dict[str, bytes], path: Path) -> None:
    for name in members:
        rest = {key: value for key, value in members.items() if key != name}
        assert outcome(path, zipped(rest)) == f"member '{name}' is missing"
    assert "'../../evil' that does not belong" in outcome(path, zipped({**members, "../../evil": b"x"}))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("workload.json", b"{}")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("workload.json", b"{}")
    assert outcome(path, buffer.getvalue()) == "two members have the same name"
    assert not list(path.parent.parent.glob("evil"))


def _wrong_arrays(array: np.ndarray) -> Iterator[bytes]:
    yield b""
    yield b"\x93NUMPY"
    yield npy(array)[:-1]
    yield npy(array) + b"\0"
    yield npy(array.astype(np.float64))
    yield npy(array.astype(object))
    yield npy(array.reshape(*array.shape, 1))
    yield npy(np.array(7))
    yield npy(array.astype(">i8"))
    yield npy(array).replace(b"'shape': (", b"'shape': (9999999999,)#")
    yield npy(array).replace(b"False", b"True ")


def test_arrays_of_another_kind_are_refused(members: dict[str, bytes], path: Path) -> None:
    for name in (name for name in members if name.endswith(".npy")):
        array = np.load(io.BytesIO(members[name]), allow_pickle=False)
        for data in _wrong_arrays(array):
            assert outcome(path, zipped({**members, name: data})), (name, data)
        if "/size_" not in name:
            beyond = npy(array.astype(np.int64) + 2**40)
            assert "beyond 32 bits" in outcome(path, zipped({**members, name: beyond}))


def test_every_value_of_every_array_may_be_wrong(members: dict[str, bytes], path: Path) -> None:
    refused = 0
    for name in (name for name in members if name.endswith(".npy")):
        array = np.load(io.BytesIO(members[name]), allow_pickle=False)
        for place in {0, array.size // 2, array.size - 1}:
            for value in (-(2**31), -1, 2**31 - 1):
                changed = array.astype(np.int64)
                changed.flat[place] = value
                refused += bool(outcome(path, zipped({**members, name: npy(changed)})))
    assert refused > 100


def _places(value: object) -> Iterator[list[str | int]]:
    """Ways to every value of a JSON document, but only the first entries of long lists."""
    yield []
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, item in items:
        for rest in _places(item):
            yield [key, *rest]


WRONG = (None, True, -1, 0, 2**70, 1.5, "x", [], {}, [[[]]], {"size": 10**9}, {"size": -1}, {"float": "1e999"})


def test_wrong_json_types_are_refused_or_valid(members: dict[str, bytes], path: Path) -> None:
    text = members["workload.json"]
    refused = total = 0
    for place in _places(json.loads(text)):
        for wrong in WRONG if place else (None, 3, [], "x"):
            head = json.loads(text)
            if place:
                holder = head
                for key in place[:-1]:
                    holder = holder[key]
                holder[place[-1]] = wrong
            else:
                head = wrong
            total += 1
            refused += bool(outcome(path, zipped({**members, "workload.json": json.dumps(head).encode()})))
    assert refused > total / 2


@pytest.mark.parametrize(
    "text", [b"", b"[", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000, b"NaN", b'"\\ud800"', b"[" * 50]
)
def test_text_that_is_no_json_is_refused(members: dict[str, bytes], path: Path, text: bytes) -> None:
    assert "workload.json" in outcome(path, zipped({**members, "workload.json": text}))


def test_a_deep_scalar_is_refused(members: dict[str, bytes], path: Path) -> None:
    head = json.loads(members["workload.json"])
    value: object = 1
    for _ in range(400):
        value = [value]
    head["programs"][0]["signatures"][0][4] = [["deep", value]]
    assert "nested more than" in outcome(path, zipped({**members, "workload.json": json.dumps(head).encode()}))


def _bombs(members: dict[str, bytes]) -> Iterator[bytes]:
    zeros = bytes(64 << 20)
    yield zipped({"workload.json": zeros})
    yield zipped({**members, "programs/0/op_signature.npy": zeros})
    yield zipped({**members, **{f"x{i}": zeros for i in range(9)}})
    lying = bytearray(zipped({**members, "programs/0/op_signature.npy": zeros}))
    for start in (i for i in range(len(lying)) if lying[i : i + 4] in (b"PK\x01\x02", b"PK\x03\x04")):
        at = start + (24 if lying[start + 2] == 1 else 22)
        if int.from_bytes(lying[at : at + 4], "little") == len(zeros):
            lying[at : at + 4] = (1000).to_bytes(4, "little")
    yield bytes(lying)


def test_bombs_are_refused_in_little_memory(members: dict[str, bytes], path: Path) -> None:
    for data in _bombs(members):
        path.write_bytes(data)
        tracemalloc.start()
        with pytest.raises(TraincastError):
            load_workload(path)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 160 << 20, peak


def test_arrays_that_would_grow_beyond_the_limit_are_refused(
    members: dict[str, bytes], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traincast.ir.file.MAX_TOTAL_BYTES", 40_000)
    grown = {**members, "programs/0/op_stream.npy": npy(np.zeros(15_000, dtype=np.int8))}
    assert "its arrays need more than" in outcome(path, zipped(grown))
    monkeypatch.setattr("traincast.ir.file.MAX_TOTAL_BYTES", 15_000)
    assert "its members unpack to more than" in outcome(path, zipped(grown))
