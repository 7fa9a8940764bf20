"""Samples, tokens and arithmetic a second."""

from __future__ import annotations

import pytest

import traincast
from tests.simulator.rank_programs import RankProgram, predict
from traincast.simulator.prediction.throughput import Throughput


@pytest.fixture(scope="module")
def bert():
    return traincast.predict("bert-large", on="a100-80gb", dtype="bf16", batch_size=4, seq_len=128)


def test_rates_follow_from_the_time_of_a_step(bert):
    document = bert.to_dict()

    assert document["samples_per_s"] == pytest.approx(4 / bert.iteration)
    assert document["tokens_per_s"] == pytest.approx(4 * 128 / bert.iteration)
    assert document["mfu"] == pytest.approx(bert.throughput.flops / bert.iteration / 312e12)
    assert (document["mfu_peak_tflops"], document["mfu_peak_type"]) == (312.0, "bf16")


def test_arithmetic_of_a_transformer_is_six_times_its_weights_and_its_attention(bert):
    layers, hidden, tokens = 24, 1024, 4 * 128
    weights = layers * 12 * hidden**2 + hidden**2 + 30522 * hidden  # blocks, head's transform, decoder
    attention = 12 * layers * hidden * 128 * tokens  # two GEMMs of every pair, forwards and twice backwards

    assert bert.throughput.flops == pytest.approx(6 * weights * tokens + attention, rel=0.01)


def test_arithmetic_of_resnet50_is_three_times_that_of_its_forward_pass():
    result = traincast.predict("resnet50", on="v100", batch_size=4)

    # 4.09 G multiplications and additions an image (He et al.: 3.8 with the stride in another place); the first
    # convolution has no gradient of its input
    forward = 2 * 4.09e9 * 4
    assert result.throughput.flops == pytest.approx(3 * forward, rel=0.02)
    assert result.to_dict()["tokens_per_s"] is None
    assert result.throughput.peak_type == "fp32"


def test_all_ranks_count():
    one = RankProgram().compute(256, 3).collective()
    two = RankProgram().compute(256, 5).collective()
    result = predict(one, two)

    assert result.throughput.flops == 8 * 2 * 256**3
    assert result.throughput.samples == pytest.approx(2 / result.iteration)
    assert result.throughput.peak_flops == pytest.approx(2 * result.platform.device.get_peak_flops("fp32"))


def test_a_step_without_products_has_no_mfu():
    rates = Throughput(samples=12.34, tokens=0.0, flops=0.0, peak_flops=1e12, peak_type="fp32", mfu=0.0)

    assert rates.text("X", 1) == "12.3 samples/s"
    assert rates.to_dict()["mfu"] is None


@pytest.mark.parametrize(("gpus", "peak"), [(1, "312 TFLOPS (bf16 peak of X)"), (8, "8 x 312 TFLOPS (bf16 peak of X)")])
def test_the_line_names_the_peak(gpus, peak):
    rates = Throughput(
        samples=1234.5, tokens=632064.0, flops=12.34e12, peak_flops=gpus * 312e12, peak_type="bf16", mfu=0.41
    )

    assert rates.text("X", gpus) == f"1,234 samples/s, 632,064 tokens/s; 12.3 TFLOP per step, MFU 41.0% of {peak}"
    assert rates.to_dict()["mfu_peak_tflops"] == gpus * 312.0


def test_more_than_the_peak_is_explained():
    rates = Throughput(samples=313.0, tokens=0.0, flops=8.66e12, peak_flops=16.35e12, peak_type="fp32", mfu=1.296)

    assert rates.text("V100", 1).endswith("MFU 129.6% of 16.35 TFLOPS (fp32 peak of V100); Winograd's convolutions "
                                          "multiply less often than is counted")  # fmt: skip
