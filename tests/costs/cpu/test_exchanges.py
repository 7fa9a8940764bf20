"""Collectives from samples: fitted, priced, and rejected by name where nothing was measured."""

from __future__ import annotations

import pytest

from tests.costs.cpu.made_up import REFERENCE, exchange_sample, exchange_samples, exchange_seconds
from traincast.costs.cpu.collectives import (
    CollectiveModels,
    CpuCollective,
    fit_collectives,
    is_collective,
    list_collectives,
)
from traincast.costs.cpu.samples import format_sample, parse_row
from traincast.utils.errors import TraincastError


def test_a_sample_says_what_every_rank_called():
    called = [CpuCollective("all_to_all_v", 4000, (1000, 3000)), CpuCollective("all_to_all_v", 4000, (8, 16))]
    again = parse_row(format_sample(exchange_sample(called)))
    assert again.ranks == 2 and is_collective(again.signature)
    assert list_collectives(again.signature, 2) == called
    assert (
        list_collectives(exchange_sample([CpuCollective("send_recv", 4096)] * 2).signature, 2)
        == [CpuCollective("send_recv", 4096)] * 2
    )


@pytest.mark.parametrize("kind", ["all_reduce", "all_to_all_v", "broadcast"])
def test_a_latency_and_a_bandwidth_are_found_again(kind):
    models, (held_out,) = fit_collectives(exchange_samples(kind), REFERENCE)
    assert held_out.group == "collectives" and held_out.n >= 2 and held_out.gmae < 3
    size = 1 << 20
    met = [CpuCollective(kind, size, (size, size) if kind == "all_to_all_v" else ())] * 2
    assert models.cost(met) == pytest.approx(exchange_seconds(met), rel=0.05)
    assert 0 < models.sigma(met) < 0.2


def test_what_moves_as_much_takes_as_long():
    models, _ = fit_collectives(exchange_samples("all_to_all"), REFERENCE)
    uneven = [CpuCollective("all_to_all_v", 0, (700, 500_000)), CpuCollective("all_to_all_v", 0, (1_500_000, 10))]
    even = [CpuCollective("all_to_all", 2_000_000)] * 2  # a rank keeps half of it
    assert models.cost(uneven) == pytest.approx(models.cost(even), rel=0.1)


def test_disturbed_samples_and_kinds_with_few_say_nothing():
    few = exchange_samples("all_gather", 3) + [
        exchange_sample([CpuCollective("broadcast", 4 << n)] * 2, spread=3.0) for n in range(10, 20)
    ]
    models, errors = fit_collectives(few, REFERENCE)
    assert not models.seconds and not errors


def test_what_was_not_measured_is_refused_with_what_was():
    models, _ = fit_collectives(exchange_samples("all_reduce"), REFERENCE)
    with pytest.raises(TraincastError, match=r"all_gather between 2 ranks was not measured \(measured: 2 all_reduce\)"):
        models.cost([CpuCollective("all_gather", 10)] * 2)
    with pytest.raises(TraincastError, match=r"all_reduce between 3 ranks was not measured"):
        models.cost([CpuCollective("all_reduce", 10)] * 3)
    with pytest.raises(TraincastError, match=r"\(measured: none\)"):
        CollectiveModels().cost([CpuCollective("all_reduce", 10)] * 2)
