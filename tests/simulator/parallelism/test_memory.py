"""Device memory of Transformers under layouts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from traincast.ir.memory import CATEGORIES, MemoryEvents
from traincast.models.transformers.description import count_all_parameters
from traincast.models.transformers.reading import load_transformer
from traincast.simulator.parallelism.layout import Layout, complete_layout
from traincast.simulator.parallelism.memory import list_stage_events

MODEL = replace(load_transformer("llama3-8b"), layers=4, hidden=512, heads=8, kv_heads=4, head_dim=64, ffn=1024,
                vocab=4096, seq_len=256)  # fmt: skip
WEIGHTS = count_all_parameters(MODEL)
WORDY = replace(MODEL, layers=1, vocab=1 << 17, seq_len=64)


def list_events(**options: object) -> list[MemoryEvents]:
    layout = complete_layout(Layout(**{"gpus": 1, "kernels": "eager", **options}), MODEL)  # type: ignore[arg-type]
    return list_stage_events(MODEL, layout, (), gpus_per_node=8, micro_batches=layout.accumulation)


def sum_peak(**options: object) -> dict[str, int]:
    events = max(list_events(**options), key=lambda one: one.peak_bytes)
    return events.sum_by_category(events.peak_tick)


def test_states_are_what_their_types_say() -> None:
    kept = sum_peak()
    assert kept["parameter"] == pytest.approx(2 * WEIGHTS, rel=0.01)
    assert kept["optimizer_state"] == pytest.approx(12 * WEIGHTS, rel=0.01)
    assert sum_peak(optimizer_state="bf16")["optimizer_state"] == pytest.approx(4 * WEIGHTS, rel=0.01)
    assert sum_peak(optimizer_state="int8")["optimizer_state"] == pytest.approx(2.03 * WEIGHTS, rel=0.01)
    assert "optimizer_state" not in sum_peak(offload=("optimizer",))
    assert sum_peak(adapter_rank=8, frozen_type="nf4")["parameter"] < 0.8 * WEIGHTS
    # Megatron's buffers of gradients are in the type that they are reduced in, and stay
    fused = list_events(kernels="fused")[0]
    assert fused.sum_by_category(-1)["gradient"] == pytest.approx(4 * WEIGHTS, rel=0.01)


def test_fsdp_shares_states_and_gathers_parameters() -> None:
    kept = sum_peak(gpus=4, sharding="zero3")
    assert kept["parameter"] == pytest.approx(WEIGHTS, rel=0.02)  # four bytes over four ranks
    assert kept["optimizer_state"] == pytest.approx(2 * WEIGHTS, rel=0.02)
    assert 0 < kept["communication"] < 4 * WEIGHTS


def test_what_saves_activations_saves_them() -> None:
    plain = sum_peak(micro_batch=4)["activation"]
    some, full = (sum_peak(micro_batch=4, checkpoint=kind)["activation"] for kind in ("selective", "full"))
    assert full < some < plain
    assert sum_peak(micro_batch=4, offload=("activations",))["activation"] < plain
    assert sum_peak(micro_batch=8)["activation"] == pytest.approx(2 * plain, rel=0.02)


def test_gradients_that_update_at_once_do_not_stay() -> None:
    late = list_events(update_in_backward=True)[0]
    kept = list_events()[0]
    last = kept.ticks - 3
    assert kept.sum_by_category(last)["gradient"] == pytest.approx(2 * WEIGHTS, rel=0.01)
    assert "gradient" not in late.sum_by_category(last)


@pytest.mark.parametrize("options", [{}, {"vp": 2}, {"checkpoint": "full"}])
def test_a_step_ends_with_what_it_began_with(options: dict[str, object]) -> None:
    for events in list_events(gpus=2, pp=2, kernels="fused", global_batch=8, **options):
        assert (events.gone > events.born).all() and events.gone.max() <= events.ticks
        assert events.live_bytes[-1] == events.live_bytes[0]


def test_the_first_stage_holds_more_micro_batches() -> None:
    first, second = list_events(gpus=2, pp=2, kernels="fused", global_batch=8)
    kept = [events.sum_by_category(events.peak_tick)["activation"] for events in (first, second)]
    per_layer = min(kept)
    assert kept[0] > 0.5 * per_layer
    alone = list_events(gpus=2, pp=2, kernels="fused", global_batch=1)[0]
    assert alone.sum_by_category(alone.peak_tick)["activation"] < kept[0]


def test_losses_keep_what_their_kernels_read() -> None:
    # given logits that are larger than all else
    def keep(kernels: str, loss: str) -> int:
        layout = complete_layout(Layout(gpus=1, micro_batch=8, kernels=kernels, loss=loss), WORDY)
        events = list_stage_events(WORDY, layout, (), gpus_per_node=8, micro_batches=1)[0]
        made = np.isin(events.category, [CATEGORIES.index(name) for name in ("activation", "temporary")])
        mine = (events.label == events.labels.index("head")) & made
        return max(int(events.blocks[mine & events.mark_alive(tick)].sum()) for tick in range(events.ticks))

    logits = 2 * 8 * WORDY.seq_len * WORDY.vocab
    # then op by op three fp32 copies stand beside each other; a compiled loss has logits and their gradients in 16 bits
    assert keep("eager", "") == keep("compiled", "eager") == pytest.approx(6 * logits, rel=0.05)
    assert keep("compiled", "") == pytest.approx(2 * logits, rel=0.05)
    # chunks: the log-softmax of all is kept op by op, and only logits are when compiled
    assert keep("compiled", "fused") < keep("compiled", "chunked") < 1.3 * logits
    assert 3 * logits < keep("eager", "chunked") < 4 * logits


def test_a_policy_keeps_what_it_saves_until_backward() -> None:
    # given every second product saved, the projection to queries and the last one among them
    plain, some = (sum_peak(micro_batch=8, kernels="compiled", loss="fused", checkpoint=kind)["activation"]
                   for kind in ("full", "selective"))  # fmt: skip
    rows = 8 * MODEL.seq_len
    saved = 2 * rows * (MODEL.hidden + MODEL.kv_heads * MODEL.head_dim + MODEL.hidden + MODEL.ffn + MODEL.hidden)
    # then every layer keeps them: queries, values, attention, the gate, the result of the last
    assert some - plain == pytest.approx(MODEL.layers * saved, rel=0.2)


def test_what_is_offloaded_is_in_host_memory() -> None:
    # given states and activations that are kept on the device, then those that are not
    assert list_events()[0].host_bytes == 0
    states = list_events(offload=("optimizer",))[0]
    assert states.host_bytes == pytest.approx(12 * WEIGHTS, rel=0.01)
    plain, moved = (list_events(micro_batch=4, offload=offload)[0] for offload in ((), ("activations",)))
    assert moved.host_bytes > 0.5 * plain.sum_by_category(plain.peak_tick)["activation"]
