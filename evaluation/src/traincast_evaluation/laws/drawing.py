"""Scenarios drawn at random from all models and platforms, with the options that their kind of step uses."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

from traincast.hardware.platform import list_device_keys, list_node_keys, load_device
from traincast.models.catalog import list_models, list_published_programs
from traincast.models.dlrm.config import STUDY_DLRMS
from traincast.models.transformers.description import Transformer
from traincast.models.transformers.reading import list_built_in_names, load_transformer
from traincast.simulator.scenario.kinds import choose_step_kind, find_source_kind
from traincast.simulator.scenario.scenario import Scenario

SHARES = {"alone": 0.72, "replicated": 0.17, "laid out": 0.07, "program": 0.04}
"""How scenarios divide: a captured or described model on one GPU, on several, a Transformer over a layout, a published
program."""
_BATCHES = (1, 2, 3, 4, 7, 8, 16, 32, 64, 100, 128, 256)
_SMALL_BATCHES = _BATCHES[:8]  # more often: a step that does not fit takes longer to answer
_LARGE_BATCHES = (512, 1024, 2048, 3000, 8192)
_LIGHT_PARAMETERS = 2e8  # larger captured Transformers are drawn less often: each takes ten times as long as the rest
_HEAVY_SHARE = 0.04
_WHOLE_SHARE, _WHOLE_LAYERS = 0.05, 24


def draw_scenario(rng: random.Random) -> Scenario:
    """One scenario; it may still be one that is rejected (a type without units, a layout that does not divide)."""
    kind = rng.choices(list(SHARES), list(SHARES.values()))[0]
    if kind == "laid out":
        return Scenario(**_draw_layout(rng))
    if kind == "program":
        return Scenario(workload=rng.choice(list(list_published_programs())), on=_draw_platform(rng, nodes=False))
    model = _draw_model(rng)
    values: dict[str, Any] = {"workload": model, "batch_size": _draw_batch(model, rng)}
    if kind == "alone":
        values["on"] = _draw_platform(rng, nodes=rng.random() < 0.2)
    else:
        values |= {"on": rng.choice(list_node_keys()), "gpus": rng.choice((1, 2, 4, 8, 8, 16, 24, 32))}
    values |= _draw_numerics(values["on"], rng)
    if rng.random() < 0.15:
        values["mode"] = "inference"
        values.pop("gpus", None)
    for name in ("compiled", "cuda_graph"):
        if rng.random() < 0.08 and "compiled" not in values:
            values[name] = True
    if rng.random() < 0.1:
        values["clock_mhz"] = float(round(0.8 * load_device_of(values["on"]).boost_clock_mhz))
    return Scenario(**values)


@cache
def _list_light_models() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Models that are quick to predict, and the others."""
    heavy = tuple(
        info.name
        for info in list_models()
        if find_source_kind(info.name) == "model" and info.parameters > _LIGHT_PARAMETERS and info.seq_len
    )
    return tuple(info.name for info in list_models() if info.name not in heavy), heavy


def _draw_model(rng: random.Random) -> str:
    light, heavy = _list_light_models()
    return rng.choice(heavy if rng.random() < _HEAVY_SHARE else light)


def _draw_batch(model: str, rng: random.Random) -> int:
    is_recommender = model in STUDY_DLRMS or model in ("dlrm-v2", "din", "deepfm", "wide-deep", "ncf")
    if is_recommender and rng.random() < 0.6:
        return rng.choice(_LARGE_BATCHES)
    return rng.choice(_BATCHES if rng.random() < 0.3 else _SMALL_BATCHES)


def _draw_platform(rng: random.Random, *, nodes: bool) -> str:
    return rng.choice(list_node_keys() if nodes else list_device_keys())


def load_device_of(on: str) -> Any:
    """The GPU of a platform by its key."""
    from traincast.hardware.platform import load_platform

    return load_device(on) if on in list_device_keys() else load_platform(on).device


def _draw_numerics(on: str, rng: random.Random) -> dict[str, Any]:
    """A type that the GPU has units for; mostly the default."""
    if rng.random() < 0.5:
        return {}
    known = [name for name in ("fp32", "tf32", "fp16", "bf16") if name in load_device_of(on).peak_flops]
    return {"dtype": rng.choice(known)}


def _draw_layout(rng: random.Random) -> dict[str, Any]:
    """A Transformer over a layout whose degrees divide its GPUs."""
    model = _thin_out(load_transformer(rng.choice(list_built_in_names())), rng)
    on = rng.choice(list_node_keys())
    tp, pp = rng.choice((1, 1, 2, 4, 8)), rng.choice((1, 1, 1, 2, 4))
    cp = rng.choice((1, 1, 1, 1, 2))
    tp = tp if model.heads % tp == 0 and model.kv_heads % tp == 0 else 1
    pp = pp if model.layers % pp == 0 else 1
    data = rng.choice((1, 2, 4, 8))
    micro = rng.choice((1, 1, 2))
    passes = pp * rng.choice((1, 2, 4)) if pp > 1 else rng.choice((1, 1, 2))
    values: dict[str, Any] = {
        "workload": model, "on": on, "gpus": tp * pp * cp * data, "micro_batch": micro,
        "global_batch": micro * data * passes, "seq_len": rng.choice((512, 1024, 2048, 4096)) if model.causal else None,
    }  # fmt: skip
    values |= {key: degree for key, degree in (("tp", tp), ("pp", pp), ("cp", cp)) if degree > 1}
    if model.experts is not None and data > 1 and rng.random() < 0.6:
        values["ep"] = rng.choice([degree for degree in (2, 4, 8) if degree <= data])
    sharing = rng.choice(("", "", "fsdp", "zero"))
    if sharing and data > 1:
        values[sharing] = rng.choice((1, 2)) if sharing == "fsdp" else rng.choice((1, 2, 3))
    if rng.random() < 0.3:
        values["checkpoint"] = rng.choice(("selective", "full"))
    if rng.random() < 0.15:
        values["kernels"] = rng.choice(("fused", "compiled"))
    return values


def _thin_out(model: Transformer, rng: random.Random) -> Transformer:
    """The model with four of its layers, most of the time: laws are about one of each kind, and all take long."""
    if rng.random() < _WHOLE_SHARE and model.layers <= _WHOLE_LAYERS:
        return model
    layers, before = min(model.layers, 4), min(model.encoder_layers, 4)
    return replace(model, name=f"{model.name}-{layers}-layers", layers=layers, encoder_layers=before)


def find_kind(scenario: Scenario) -> str:
    """The kind of the step of a scenario."""
    return choose_step_kind(find_source_kind(scenario.workload), scenario)
