"""Fitting attention: rows of every framework are checked, bad ones named, the same bytes twice."""

from __future__ import annotations

import pytest
from traincast_evaluation.kernels.attention.fit import TRAINING
from traincast_evaluation.kernels.attention.measurements import read_attention

from traincast.utils.errors import TraincastError

polars = pytest.importorskip("polars")


def attention(folder, **changes):
    """A tiny table of two frameworks, of which only the second is fitted, with one thing changed."""
    table = {
        "device": ["NVIDIA L40S"] * 8, "framework": ["sglang"] * 4 + ["vllm"] * 4, "dtype": ["bfloat16"] * 8,
        "batch": [1, 2, 4, 8] * 2, "seq_len": [128] * 8, "num_q_heads": [8] * 8, "num_kv_heads": [8] * 8,
        "head_dim": [64] * 8, "latency_us": [20.0] * 8,
    }  # fmt: skip
    table.update(changes)
    (folder / "kernels").mkdir()
    polars.DataFrame(table).write_parquet(folder / "kernels" / "attention_mixed.parquet")
    return folder


def test_attention_is_checked_in_the_rows_of_every_framework(tmp_path):
    assert len(read_attention(attention(tmp_path)).seconds) == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": ["NVIDIA L40S"] * 2 + ["Voodoo 2"] + ["NVIDIA L40S"] * 5}, ["row 2", "'device'", "Voodoo 2"]),
        ({"latency_us": [20.0] * 3 + [1e-3] + [20.0] * 4}, ["row 3", "'latency_us'", "faster"]),
        ({"dtype": ["bfloat16"] * 7 + ["fp8"]}, ["row 7", "'dtype'", "fp8"]),
        ({"framework": ["sglang"] * 8}, ["framework", "vllm"]),
    ],
)
def test_bad_attention_rows_are_named(tmp_path, change, words):
    with pytest.raises(TraincastError) as caught:
        read_attention(attention(tmp_path, **change))
    for word in ["attention_mixed", *words]:
        assert word in str(caught.value)


def test_fitting_twice_gives_the_same_bytes(shared_data, tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        TRAINING(shared_data, tmp_path / name, lambda what, share: None)
    for file in ("attention.npz", "attention.json"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()
