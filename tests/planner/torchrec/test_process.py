"""TorchRec in a process that has captured a DLRM."""

from __future__ import annotations

import subprocess
import sys

from tests.planner.torchrec.conftest import NEEDS_TORCHREC


@NEEDS_TORCHREC
def test_torchrec_can_be_imported_after_ops_of_a_dlrm_were_defined():
    code = (
        "import traincast_evaluation.zoo.define.embedding_ops\n"
        "from traincast.planner.torchrec.planner import import_torchrec\n"
        "print(import_torchrec().__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("torchrec")
