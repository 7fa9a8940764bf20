"""The store: whole after any kill, one device only, and plain about what is wrong with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from tests.calibration.made_up import samples
from traincast.benching.device import Identity
from traincast.benching.store import Store
from traincast.errors import TraincastError

HERE = Identity(
    device="cpu", name="made up", threads=1, locked_clock_mhz=0.0, memory_bytes=1 << 30, torch="2.13", libraries="mkl"
)
WRITER = """
import sys
from pathlib import Path
from tests.benching.test_store import HERE
from tests.calibration.made_up import samples
from traincast.benching import store as stores
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
    monkeypatch.setattr("traincast.benching.store._MERGE_FROM", 3)
    filled(tmp_path, 4).merge()
    assert [file.name for file in tmp_path.iterdir()] == ["segment-000004.parquet"]
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
        ({"name": "another"}, "name another / made up"),
        ({"threads": 2}, "threads 1 / 2"),
        ({"torch": "2.14"}, "torch 2.13 / 2.14"),
        ({"locked_clock_mhz": 900.0}, "locked_clock_mhz 0.0 / 900.0"),
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


def test_a_damaged_file_is_named_and_the_rest_stays(tmp_path):
    filled(tmp_path)
    damaged = tmp_path / "sample-000002.parquet"
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(TraincastError, match=r"sample-000002.parquet' is damaged .*move it away"):
        Store(tmp_path, HERE)
    damaged.unlink()
    assert len(Store(tmp_path, HERE)) == 2


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path, monkeypatch):
    store = filled(tmp_path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TraincastError, match="No space left on device"):
        store.append("more", samples(1)[0])
    assert len(Store(tmp_path, HERE)) == 3


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
