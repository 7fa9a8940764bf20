"""Captured models that GPUs share, and updates of several passes, as scenarios ask for them."""

from __future__ import annotations

import pytest

from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError

SAME_SIZES = """
name: gpt2-large-described
layers: 36
hidden: 1280
heads: 20
kv_heads: 20
head_dim: 64
ffn: 5120
vocab: 50257
seq_len: 1024
norm: layer
activation: gelu
position: learned
bias: true
qkv_bias: true
tied: true
"""


def ask(workload="vgg13", **fields):
    return predict(Scenario(**{"workload": workload, "on": "dgx-h100", "batch_size": 4, **fields}))


def figures(result):
    document = result.to_dict()
    return [document[key] for key in ("iteration_ms", "interval_ms", "memory_gb", "per_family")]


@pytest.mark.parametrize("fields", [{"zero": 1}, {"zero": 2}, {"zero": 3}, {"fsdp": 2, "no_reshard": True}])
def test_one_gpu_has_nothing_to_share(fields):
    alone, shared = ask(), ask(gpus=1, **fields)
    assert shared.iteration == pytest.approx(alone.iteration, rel=1e-3)
    assert shared.to_dict()["memory_gb"] == alone.to_dict()["memory_gb"]


def test_one_pass_of_all_gpus_is_plain_data_parallelism():
    plain = figures(ask(gpus=8))
    assert figures(ask(gpus=8, global_batch=32)) == plain
    assert figures(ask(gpus=8, batch_size=None, micro_batch=4, global_batch=32)) == plain


@pytest.mark.parametrize("fields", [{}, {"zero": 1}, {"zero": 2}, {"fsdp": 2}])
def test_passes_multiply_samples_and_share_one_update(fields):
    # Given a step of one pass and one of four
    one, four = ask(gpus=8, **fields), ask(gpus=8, global_batch=128, **fields)

    # Then the second has four times the samples in less than four times the time
    assert four.workload.samples == 4 * one.workload.samples == 16
    assert 2 * one.iteration < four.iteration < 4 * one.iteration
    assert any("a step is 4 batches of 4 samples and one update" in note for note in four.warnings)


def test_ranks_that_share_more_keep_less():
    asked = ({}, {"zero": 1}, {"zero": 2}, {"fsdp": 2})
    peaks = [ask("gpt2-large", gpus=8, dtype="bf16", optimizer="adam", **fields).memory.peak_bytes for fields in asked]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[3] < 0.8 * peaks[0]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_fsdp_costs_a_captured_model_what_it_costs_a_described_one(tmp_path, dtype):
    # Given gpt2-large as a capture, and a description of the same sizes, both without their updates. Alone the capture
    # is slower: it has dropout, GELU op by op, and (bf16) autocast's casts of activations
    (tmp_path / "same.yaml").write_text(SAME_SIZES)
    slower, sent = [], []
    for model in ("gpt2-large", str(tmp_path / "same.yaml")):
        fields = {"dtype": dtype, "attention": "sdpa", "optimizer": "none"}
        alone, shared = ask(model, **fields), ask(model, gpus=8, fsdp=2, **fields)
        slower.append(shared.iteration / alone.iteration)
        sent.append(shared.to_dict()["per_family"]["collective"])

    # When 8 GPUs share it, then both exchange the same and are slowed down alike; the capture also copies what is sent
    # into and out of buffers, which descriptions leave out
    assert sent[0] == pytest.approx(sent[1], rel=0.05)
    assert slower[0] == pytest.approx(slower[1], rel=0.05)
    assert slower[0] > 1.0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mode": "inference", "fsdp": 2}, "is asked for inference, which shares nothing; leave out `fsdp`"),
        ({"fsdp": 2, "zero": 1}, "`zero=1` contradicts it"),
        ({"micro_batch": 2}, "both say how many samples per GPU has at a time"),
        ({"global_batch": 33}, "`global_batch` 33 is no multiple of the 32 samples of 8 GPUs with 4 each"),
        ({"global_batch": 32 * 1000}, "takes 1000 passes of 32 samples, more than the 128 that are simulated"),
        ({"zero": 2, "no_reshard": True}, "`no_reshard` is for parameters that ranks share"),
        ({"workload": "deepfm", "zero": 1}, "deepfm divides its embedding tables among GPUs by their plan"),
        ({"workload": "deepfm", "program": "torchrec", "global_batch": 64}, "leave out `global_batch`"),
    ],
)
def test_what_cannot_be_shared_is_an_error_with_a_remedy(fields, said):
    with pytest.raises(TraincastError, match=said):
        ask(gpus=8, **fields)
