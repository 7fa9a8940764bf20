"""A captured step and a description that states the same program take the same time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import traincast
from traincast.models.catalog import load_model
from traincast.models.transformers.description import Transformer

_LIKE_GPT2: dict[str, Any] = {
    "norm": "layer", "activation": "gelu_new", "position": "learned", "bias": True, "qkv_bias": True, "tied": True,
    "joined": True, "vocab": 50257,
}  # fmt: skip
_SAME_PROGRAM: dict[str, Any] = {"dropout": True, "optimizer_impl": "foreach"}
"""What the captured built-in Transformers do besides: dropout, and Adam as PyTorch runs it by default."""


def describe(name: str) -> Transformer:
    shapes: dict[str, dict[str, Any]] = {
        "gpt2-large": {"layers": 36, "hidden": 1280, "heads": 20, "ffn": 5120, "seq_len": 1024, **_LIKE_GPT2},
        "gpt3-xl": {"layers": 24, "hidden": 3072, "heads": 24, "ffn": 12288, "seq_len": 2048, **_LIKE_GPT2},
        "gpt3-2.7b": {"layers": 32, "hidden": 2560, "heads": 32, "ffn": 10240, "seq_len": 2048, **_LIKE_GPT2},
        "opt-1.3b": {
            **_LIKE_GPT2, "layers": 24, "hidden": 2048, "heads": 32, "ffn": 8192, "seq_len": 2048, "vocab": 50272,
            "activation": "relu", "joined": False,
        },
        "bert-large": {
            **_LIKE_GPT2, "layers": 24, "hidden": 1024, "heads": 16, "ffn": 4096, "seq_len": 512, "vocab": 30522,
            "activation": "gelu", "joined": False, "causal": False,
        },
    }  # fmt: skip
    sizes = shapes[name]
    return Transformer(name=name, kv_heads=sizes["heads"], head_dim=sizes["hidden"] // sizes["heads"], **sizes)


@pytest.mark.parametrize(
    ("name", "on", "dtype", "attention"),
    [
        ("gpt2-large", "a100-80gb", "fp32", "sdpa"),
        ("gpt2-large", "a100-80gb", "fp32", "eager"),
        ("gpt2-large", "a100-80gb", "bf16", "sdpa"),
        ("gpt2-large", "a100-80gb", "bf16", "eager"),
        ("gpt2-large", "h100", "bf16", "sdpa"),
        ("gpt2-large", "v100", "fp16", "eager"),
        ("gpt3-xl", "h100", "bf16", "sdpa"),
        ("gpt3-2.7b", "a100-80gb", "bf16", "sdpa"),
        ("opt-1.3b", "a100-80gb", "bf16", "sdpa"),
        ("bert-large", "a100-80gb", "bf16", "eager"),
        ("bert-large", "a100-80gb", "fp32", "eager"),
    ],
)
def test_a_capture_takes_as_long_as_a_description_of_its_program(name, on, dtype, attention):
    # given a built-in model that was captured, and the same program described
    asked: dict[str, Any] = {"on": on, "batch_size": 4, "dtype": dtype, "attention": attention}
    captured = traincast.predict(name, **asked)
    described = traincast.predict(describe(name), autocast=dtype != "fp32", **asked, **_SAME_PROGRAM)

    # then both take the same time
    assert described.iteration == pytest.approx(captured.iteration, rel=0.03)


@pytest.mark.parametrize(
    ("name", "on", "dtype", "attention"),
    [
        ("gpt2-large", "h100", "bf16", "sdpa"),
        ("bert-large", "a100-80gb", "bf16", "eager"),
        ("bert-large", "h100", "bf16", "sdpa"),
        ("gpt2-large", "b200", "bf16", "sdpa"),
    ],
)
def test_the_host_takes_as_long_for_a_description_as_for_a_capture(name, on, dtype, attention):
    # given a step of one sample, for which the GPU waits; a described step waits for its loss
    captured = replace(load_model(name, precision=dtype, attention=attention), synchronised=True)
    asked: dict[str, Any] = {"on": on, "batch_size": 1}
    measured = traincast.predict(captured, **asked)
    assert measured.device_active < 0.9 * measured.host

    # when the same program is described
    described = traincast.predict(
        describe(name), autocast=True, dtype=dtype, attention=attention, **asked, **_SAME_PROGRAM
    )

    # then host and step take the same time
    assert described.host == pytest.approx(measured.host, rel=0.03)
    assert described.iteration == pytest.approx(measured.iteration, rel=0.03)
