"""TorchRec in a process that has captured a DLRM."""

from __future__ import annotations

import subprocess
import sys

from tests.planner.torchrec.conftest import NEEDS_TORCHREC


@NEEDS_TORCHREC
def test_torchrec_after_a_capture_is_refused_and_does_not_end_the_process():
    code = (
        "import traincast.models.zoo.define.embedding_ops\n"
        "from traincast.utils.errors import TraincastError\n"
        "from traincast.planner.torchrec.objects import torchrec\n"
        "try:\n    torchrec()\nexcept TraincastError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "process of its own" in done.stdout
