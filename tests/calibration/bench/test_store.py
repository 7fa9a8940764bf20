"""The store: whole after any kill, one device only, and plain about what is wrong with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import polars as pl
import pytest

from tests.costs.cpu.made_up import samples
from traincast.calibration.bench.device import Identity
from traincast.calibration.bench.store import Store, read_rows
from traincast.utils.errors import TraincastError

HERE = Identity(
    device="cpu", name="made up", threads=1, locked_clock_mhz=0.0, memory_bytes=1 << 30, torch="2.13", libraries="mkl"
)
WRITER = """
import sys
from pathlib import Path
from tests.calibration.bench.test_store import HERE
from tests.costs.cpu.made_up import samples
from traincast.calibration.bench import store as stores
stores._MERGE_FROM = 5
store = stores.Store(Path(sys.argv[1]), HERE)
print("began", len(store), flush=True)
sample = samples(1)[0]
while True:
    store.append(f"key-{len(store)}", sample)
    print("one more", flush=True)
    if len(store) % 7 == 0:
        store.merge()
"""


def filled(folder, number=3):
    store = Store(folder, HERE)
    for count, sample in enumerate(samples(number)):
        store.append(f"key-{count}", sample)
    return store


def test_samples_come_back_in_order(tmp_path):
    filled(tmp_path / "store")
    again = Store(tmp_path / "store", HERE)
    assert list(again.samples()) == samples(3)
    assert "key-1" in again and "key-9" not in again


def test_merging_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("traincast.calibration.bench.store._MERGE_FROM", 3)
    filled(tmp_path, 4).merge()
    assert [file.name for file in tmp_path.iterdir() if file.suffix] == ["segment-000004.parquet"]
    store = Store(tmp_path, HERE)
    store.append("another", samples(1)[0])
    assert len(Store(tmp_path, HERE)) == 5


def test_a_sample_in_two_files_counts_once(tmp_path):
    store = filled(tmp_path)
    store._write("segment-000003.parquet", list(store._rows.values()))
    assert len(Store(tmp_path, HERE)) == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "another"}, "name another here, made up in the store; give another folder with `store`"),
        ({"threads": 2}, "threads 2 here, 1 in the store"),
        ({"torch": "2.14"}, "torch 2.14 here, 2.13 in the store"),
        ({"libraries": "cuda 13"}, "libraries cuda 13 here, mkl in the store"),
        ({"locked_clock_mhz": 900.0}, "locked_clock_mhz 900.0 here, 0.0 in the store"),
        ({"memory_bytes": 1 << 31}, "memory_bytes 2147483648 here, 1073741824 in the store"),
    ],
)
def test_another_machine_is_refused(tmp_path, change, said):
    filled(tmp_path)
    with pytest.raises(TraincastError, match=f"is of another machine or set-up: {said}"):
        Store(tmp_path, replace(HERE, **change))


def test_a_mixed_store_is_refused(tmp_path):
    store = filled(tmp_path)
    store.identity = replace(HERE, threads=4)
    store.append("other", samples(1)[0])
    with pytest.raises(TraincastError, match="mixes devices, threads, clocks or versions: threads 1 / 4"):
        Store(tmp_path)


def test_a_kernel_that_keeps_more_memory_is_no_other_machine(tmp_path):
    filled(tmp_path)
    assert len(Store(tmp_path, replace(HERE, memory_bytes=(1 << 30) - (1 << 20)))) == 3


def rewritten(file, **columns):
    """The file with columns replaced; None drops one."""
    frame = pl.read_parquet(file)
    for name, value in columns.items():
        frame = frame.drop(name) if value is None else frame.with_columns(pl.lit(value).alias(name))
    frame.write_parquet(file)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:100]), "it is no Parquet file"),
        (lambda file: file.write_bytes(file.read_bytes()[400:]), ""),
        (lambda file: file.write_bytes(b""), "it is no Parquet file"),
        (lambda file: file.write_bytes(b"\x00" * 4096), "it is no Parquet file"),
        (lambda file: file.write_bytes(b"PAR1" + bytes(range(256)) * 8 + b"\x40\x00\x00\x00PAR1"), "no Parquet file"),
        (lambda file: rewritten(file, key=None), "no samples: KeyError"),
        (lambda file: rewritten(file, identity=None), "no samples: KeyError"),
        (lambda file: rewritten(file, identity="no JSON"), "no samples: JSONDecodeError"),
        (lambda file: rewritten(file, identity='{"colour": "red"}'), "no samples: TypeError"),
        (lambda file: rewritten(file, number="first"), "no key or number"),
        (lambda file: rewritten(file, key=1.5), "no key or number"),
        (lambda file: rewritten(file, op="[1, 2]"), "a sample of the store is damaged"),
        (lambda file: rewritten(file, wall="long"), "a sample of the store is damaged"),
        (lambda file: rewritten(file, busy=float("nan")), "a time is not finite"),
        (lambda file: rewritten(file, reference_wall=0.0), "a reference took no time"),
        (lambda file: pl.DataFrame({"key": ["a"]}).select(pl.col("key").repeat_by(6_000_000).explode()).write_parquet(
            file), "6000000 rows"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named_and_the_rest_stays(tmp_path, damage, said):
    filled(tmp_path)
    damaged = tmp_path / "sample-000002.parquet"
    damage(damaged)
    with pytest.raises(TraincastError, match=rf"sample-000002.parquet' is damaged \(.*{said}.*\); move it away"):
        Store(tmp_path, HERE)
    damaged.unlink()
    store = Store(tmp_path, HERE)
    store.append("another", samples(1)[0])
    assert {"key-0", "key-2", "another"} == set(Store(tmp_path, HERE)._rows), "no file was written over"


def test_files_that_are_merged_while_they_are_read_are_read_again(tmp_path, monkeypatch):
    filled(tmp_path)
    gone = [True, False, False, False]

    def read(file):
        if gone.pop(0):
            raise FileNotFoundError(file)
        return read_rows(file)

    monkeypatch.setattr("traincast.calibration.bench.store.read_rows", read)
    assert len(Store(tmp_path, HERE)) == 3
    gone[:] = [True] * 5
    with pytest.raises(TraincastError, match="changes while it is read; try again"):
        Store(tmp_path, HERE)


def test_one_run_at_a_time_adds_to_a_store(tmp_path):
    first, second = filled(tmp_path), Store(tmp_path, HERE)
    with pytest.raises(TraincastError, match=r"in use by another run; wait until it ends, or give another folder"):
        second.append("more", samples(1)[0])
    first.append("last", samples(1)[0])
    assert len(Store(tmp_path)) == 4, "anybody may read"
    del first
    second.append("more", samples(1)[0])
    assert len(second) == len(Store(tmp_path)) == 5, "what the other added is known by then"


def test_a_file_system_without_locks_is_used_all_the_same(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("traincast.calibration.bench.store.fcntl.flock", none)
    assert len(filled(tmp_path)) == 3


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TraincastError, match=r"cannot write to store '.*file/store': Not a directory; give another"):
        Store(tmp_path / "file" / "store", HERE).append("a", samples(1)[0])


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path, monkeypatch):
    store = filled(tmp_path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        TraincastError, match=r"No space left on device; nothing .* is lost: put it right, and the same"
    ):
        store.append("more", samples(1)[0])
    assert len(store) == len(Store(tmp_path, HERE)) == 3
    assert sorted(file.name for file in tmp_path.iterdir() if file.suffix != ".parquet") == [".lock"]


def test_a_store_is_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TraincastError, match="is no folder"):
        Store(tmp_path / "file", HERE)


@pytest.mark.parametrize("seed", [1])
def test_killed_at_any_moment_the_store_stays_readable_and_goes_on(tmp_path, seed):
    held = 0
    for turn in range(4):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        assert writer.stdout.readline() == f"began {held}\n"
        for _ in range(1 + turn):
            writer.stdout.readline()
        time.sleep(0.03 * ((seed * 7 + turn * 5) % 11) / 11)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        now = len(Store(tmp_path, HERE))
        assert now >= held + 1 + turn, "what was said to be stored is"
        held = now
