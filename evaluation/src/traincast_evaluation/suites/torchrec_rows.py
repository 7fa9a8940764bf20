"""Which captured step a row of TorchRec's pipeline benchmark ran, for its time and for its memory.

Rows have the program of their release: 1.8.0 ("newest"), or 1.6.1 ("before"), whose pipelines hold the pooled
embeddings of a batch until it is done (pull request 4008 ended that). Inputs that are freed early came in between:
1.7.0 with that line put back."""

from __future__ import annotations

from functools import cache
from importlib.resources import as_file, files

from traincast.ir.file import load_workload
from traincast.ir.workload import Workload
from traincast_evaluation.suites.published import Row

_NEWEST = 4008  # the pull request after which pipelines no longer hold pooled embeddings
_AFTER = "sparse_data_dist_base_after"  # of its own two rows the one with its change
_BATCH = 32768
# Steps by a word of a row's name, the first that fits: the flags of the table are those of one of two rows. A step with
# its release in its name is captured of that one only.
_CAPTURES: dict[str, dict[str, str]] = {
    "sparse_data_dist_base": {
        "free_input_inplace": "free_inplace", "free_input": "free", "clear_inputs": "clear", "bwd_opt": "bwdopt",
        "inplace": "inplace", "sync_fwd": "sync_fwd", "": "base",
    },
    "eval_dp_cpu": {
        "eval_gpu_inplace": "eval_gpu_inplace", "eval_gpu": "eval_gpu", "inplace": "eval_cpu_inplace", "": "eval_cpu",
    },
    "prefetch_emo": {"prefetch_emo": "prefetch_emo", "sparse_emo": "sparse_emo"},
    "sparse_data_dist_metrics": {"": "metrics"},
    "sparse_data_dist_eval": {"": "eval_sdd"},
    "sparse_data_dist_shampoo": {
        "opt_stash": "shampoo_optstash", "bwd_opt": "newest-bwdopt_shampoo", "": "shampoo",
    },
}  # fmt: skip


def find_captured_step(row: Row) -> str | None:
    """The captured step of a row; None where none was captured. One configuration's batch is in another table."""
    release = name_release(row)
    if row["name"] == "sparse_data_dist_emb_stash":
        return f"{release}-emb_stash"
    if not row["batch_size"] or float(row["batch_size"]) != _BATCH:
        return None
    names = _CAPTURES.get(row["yaml"], {})
    step = next((step for word, step in names.items() if word in row["name"]), None)
    return step if step is None or "-" in step else f"{release}-{step}"


def name_release(row: Row) -> str:
    """The release that a row ran: "newest" or "before"."""
    return "newest" if row["pr"] and (float(row["pr"]) > _NEWEST or row["name"] == _AFTER) else "before"


@cache
def load_captured_step(name: str) -> Workload:
    """A captured step: of TorchRec's benchmark by release and configuration, two ranks with a batch of 32,768 each; of
    OneTrans (the model of March 2026 in a loop as its trainer's) by its number of GPUs, which share 4,096."""
    with as_file(files("traincast_evaluation") / "suites" / "captured_torchrec" / f"{name}.tc") as path:
        return load_workload(path)
