"""The journal of a sweep: one sweep at a time, whole lines, what cannot be written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import traincast
from traincast.planner.what_if.sweeps.run import Journal
from traincast.utils.errors import TraincastError

ROW = {"error": "none"}


def test_a_journal_holds_what_was_added(tmp_path):
    journal = Journal(tmp_path / "s.csv", "mine", 5)
    journal.add([3, 1], [ROW, ROW])
    journal.close()
    again = Journal(tmp_path / "s.csv", "mine", 5)
    assert again.done == {3: ROW, 1: ROW}
    again.remove()
    assert not list(tmp_path.iterdir())


def test_two_sweeps_do_not_write_one_journal(tmp_path):
    # given a sweep of another process that is under way
    code = (
        "import sys; from pathlib import Path; from traincast.planner.what_if.sweeps.run import Journal\n"
        "held = Journal(Path(sys.argv[1]), 'mine', 5); print('ready', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "s.csv")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "ready\n"

        # then the same sweep is not begun a second time
        with pytest.raises(TraincastError, match="another sweep is writing"):
            Journal(tmp_path / "s.csv", "mine", 5)
    finally:
        other.kill()
        other.communicate()

    # and it goes on once the other one is gone, however it ended
    Journal(tmp_path / "s.csv", "mine", 5).remove()


def test_rows_that_are_no_points_are_computed_again(tmp_path):
    head = Journal(tmp_path / "s.csv", "mine", 5)
    head.close()
    with head.path.open("a") as file:
        for entry in ({"point": 1, "row": {"iteration_ms": 1.0}}, {"point": 9, "row": ROW}, {"point": 2, "row": ROW}):
            file.write(json.dumps(entry) + "\n")
    assert Journal(tmp_path / "s.csv", "mine", 5).done == {2: ROW}


def test_a_full_disk_is_told_and_what_was_written_stays(tmp_path):
    journal = Journal(tmp_path / "s.csv", "mine", 5)
    journal.add([0], [ROW])
    with Path("/dev/full").open("wb", buffering=0) as full:
        os.dup2(full.fileno(), journal._file.fileno())
    with pytest.raises(TraincastError, match="No space left on device; points so far are kept"):
        journal.add([1], [ROW])
    journal.close()
    assert Journal(tmp_path / "s.csv", "mine", 5).done == {0: ROW}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to_is_told(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(TraincastError, match="cannot write"):
        traincast.sweep("dlrm-ddp", on="v100", vary={"batch-size": [1, 2]}, out=tmp_path / "s.csv", processes=1)
