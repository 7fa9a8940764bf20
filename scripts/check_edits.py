"""Every edit on every built-in model and published program: a sound step, or a reason. Takes minutes.

.venv/bin/python scripts/check_edits.py [MODEL ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.what_if.matrix import check_edit, models, texts

LARGE = ("distributed-embeddings-large", "distributed-embeddings-jumbo")


def main(wanted: list[str]) -> None:
    """Prints a line a model: how many edits apply, and how many say why not."""
    for model in wanted or [name for name in models() if name not in LARGE]:
        reasons = {text: check_edit(model, text) for text in texts()}
        refused = {text: reason for text, reason in reasons.items() if reason}
        print(f"{model}: {len(reasons) - len(refused)} of {len(reasons)} edits apply", flush=True)
        if wanted:
            for text, reason in refused.items():
                print(f"  {text}: {reason}")


if __name__ == "__main__":
    main(sys.argv[1:])
