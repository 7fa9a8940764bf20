"""What every result must be, whatever was asked: a seeded slice of built-in models, platforms and sizes."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from traincast.hardware.platform import list_device_keys, load_device
from traincast.models.catalog import list_models
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.scenario import Scenario

MODELS = tuple(info.name for info in list_models())
BATCHES = (1, 2, 7, 16, 64)
# each card has more of everything than the one before it, of the same generation
FAMILIES = (
    ("l4", "l40", "l40s"),
    ("h100-pcie", "h100", "h200"),
    ("a30", "a100-40gb", "a100-80gb"),
    ("mi210", "mi300x"),
)
_ROUNDING = 1e-9  # relative: sums in another order
_CASTS = 1.05  # what autocast's copies may add to the kernels of a step in which GEMMs are few


def asked(model: str, device: str, *, gpus: int | None = None, **variant: Any) -> Prediction:
    return predict(Scenario(workload=model, on=device, **variant, gpus=gpus))


def drawn(count: int, *, seed: int) -> list[tuple[str, str, int]]:
    """Cases of model, device and batch size: every model in turn, the others at random."""
    rng = random.Random(seed)
    return [(MODELS[i % len(MODELS)], rng.choice(list_device_keys()), rng.choice(BATCHES)) for i in range(count)]


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for inner in value.values() for number in numbers(inner)]
    if isinstance(value, list):
        return [number for inner in value for number in numbers(inner)]
    return [value] if isinstance(value, int | float) else []


@pytest.mark.parametrize(("model", "device", "batch"), drawn(2 * len(MODELS), seed=1))
def test_an_answer_agrees_with_itself(model, device, batch):
    result = asked(model, device, batch_size=batch)

    low, high = result.interval
    assert 0 < low <= result.iteration <= high
    assert result.device_active + result.device_idle == pytest.approx(result.iteration, rel=1e-6)
    assert result.device_active > 0 and result.host > 0 and result.memory.peak_bytes > 0
    assert all(seconds > 0 for seconds in result.by_family.values())
    assert all(math.isfinite(number) and number >= 0 for number in numbers(result.to_dict()))


@pytest.mark.parametrize(("model", "device", "batch"), drawn(len(MODELS), seed=2))
def test_the_same_question_has_the_same_answer_byte_for_byte(model, device, batch):
    first, second = (json.dumps(asked(model, device, batch_size=batch).to_dict()) for _ in range(2))

    assert first == second


@pytest.mark.parametrize(("model", "device", "batch"), drawn(len(MODELS), seed=3))
def test_a_larger_batch_takes_more_memory_and_no_less_time(model, device, batch):
    small, large = (asked(model, device, batch_size=size) for size in (batch, 4 * batch))

    # a small batch of a model that is nearly all tables peaks in its update, which knows no batch
    update_peaks = model == "ncf"
    assert large.memory.peak_bytes > small.memory.peak_bytes - update_peaks
    assert large.iteration >= small.iteration * (1 - _ROUNDING)


@pytest.mark.parametrize(("model", "device", "batch"), drawn(len(MODELS), seed=4))
def test_one_gpu_is_one_gpu(model, device, batch):
    alone, one = (asked(model, device, batch_size=batch, gpus=gpus).to_dict() for gpus in (None, 1))

    assert alone == one


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family[0])
@pytest.mark.parametrize("model", ["vgg13", "bert-large", "dlrm-default", "transformer"])
def test_the_kernels_of_a_better_card_are_not_slower(model, family):
    active = [asked(model, device, batch_size=16).device_active for device in family]

    assert active == sorted(active, reverse=True)


@pytest.mark.parametrize("device", list_device_keys())
def test_tf32_is_not_slower_than_fp32_on_any_device(device):
    for model in ("vgg13", "transformer"):
        exact, fast = (asked(model, device, batch_size=16, dtype=dtype) for dtype in ("fp32", "tf32"))

        assert fast.iteration <= exact.iteration * (1 + _ROUNDING)
        missing = [said for said in fast.warnings if "no TF32 units" in said]
        assert ("tf32" in load_device(device).peak_flops) == (not missing)


@pytest.mark.parametrize("device", [key for key in list_device_keys() if "bf16" in load_device(key).peak_flops])
def test_16_bits_are_not_slower_than_32_where_there_are_units(device):
    for dtype in ("fp16", "bf16"):
        exact, fast = (asked("transformer", device, batch_size=64, dtype=name) for name in ("fp32", dtype))

        assert fast.device_active <= _CASTS * exact.device_active
