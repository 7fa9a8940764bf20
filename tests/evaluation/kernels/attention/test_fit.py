"""Fitting attention: rows of every framework are checked, bad ones named, the same bytes twice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.costs.kernels.attention.test_model import attention
from traincast.costs.kernels.attention import ATTENTION
from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.families import load_shipped_model
from traincast.hardware import load_device
from traincast.utils.errors import TraincastError
from traincast_evaluation.kernels.attention.fit import TRAINING, fit_attention, predict_as_served
from traincast_evaluation.kernels.attention.measurements import read_attention
from traincast_evaluation.kernels.samples import Measurements

polars = pytest.importorskip("polars")


def attention_table(folder, **changes):
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
    assert len(read_attention(attention_table(tmp_path)).seconds) == 4


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
        read_attention(attention_table(tmp_path, **change))
    for word in ["attention_mixed", *words]:
        assert word in str(caught.value)


def test_fitting_twice_gives_the_same_bytes(shared_data, tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        TRAINING(shared_data, tmp_path / name, lambda what, share: None)
    for file in ("attention.npz", "attention.json"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()


def test_training_does_not_pay_for_the_copy_into_a_servers_cache():
    model, device = load_shipped_model("attention"), load_device("a100-80gb")
    calls = Calls.of(ATTENTION, [attention(64, 4, 256, kv_heads=kv_heads) for kv_heads in (4, 1)])
    kernel, served = model.predict(calls, device), predict_as_served(model)(calls, device)
    copies = served.seconds - kernel.seconds
    assert (copies > 0.03 * kernel.seconds).all()
    assert copies[0] > 2 * copies[1], "more keys and values are copied where more heads have their own"


def test_a_head_dimension_that_a_card_lacks_is_learned_from_the_others():
    """Given the same card twice, once measured at one head dimension only; then both know the other one."""
    model, device = load_shipped_model("attention"), load_device("l40s")
    some = [attention(b, h, s, d) for b in (1, 4, 64) for h in (4, 16) for s in (64, 512, 4096) for d in (64, 128)]
    calls = Calls.of(ATTENTION, some)
    narrow = calls["head_dim"] == 64
    seconds = predict_as_served(model)(calls, device).seconds
    both = np.concatenate([np.zeros(len(calls), dtype=np.int64), np.ones(int((~narrow).sum()), dtype=np.int64)])
    rows = np.concatenate([np.arange(len(calls)), np.flatnonzero(~narrow)])
    twin = replace(device, key="twin", name="twin")

    fitted = fit_attention(Measurements(calls.take(rows), [device, twin], both, seconds[rows]))

    shown = predict_as_served(fitted)(calls, twin)
    np.testing.assert_allclose(shown.seconds, seconds, rtol=0.05)
    assert np.array_equal(shown.in_domain, ~narrow)
