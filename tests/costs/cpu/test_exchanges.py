"""Collectives from samples: fitted, priced, and refused by name where nothing was measured."""

from __future__ import annotations

import pytest

from tests.costs.cpu.made_up import REFERENCE, exchange_sample, exchange_samples, exchange_seconds
from traincast.costs.cpu.exchanges import (
    Exchange,
    ExchangeModels,
    exchanges_of,
    fit_exchanges,
    is_exchange,
)
from traincast.costs.cpu.samples import parse_row, sample_row
from traincast.utils.errors import TraincastError


def test_a_sample_says_what_every_rank_called():
    called = [Exchange("all_to_all_v", 4000, (1000, 3000)), Exchange("all_to_all_v", 4000, (8, 16))]
    again = parse_row(sample_row(exchange_sample(called)))
    assert again.ranks == 2 and is_exchange(again.signature)
    assert exchanges_of(again.signature, 2) == called
    assert (
        exchanges_of(exchange_sample([Exchange("send_recv", 4096)] * 2).signature, 2)
        == [Exchange("send_recv", 4096)] * 2
    )


@pytest.mark.parametrize("kind", ["all_reduce", "all_to_all_v", "broadcast"])
def test_a_latency_and_a_bandwidth_are_found_again(kind):
    models, (held_out,) = fit_exchanges(exchange_samples(kind), REFERENCE)
    assert held_out.group == "collectives" and held_out.n >= 2 and held_out.gmae < 3
    size = 1 << 20
    met = [Exchange(kind, size, (size, size) if kind == "all_to_all_v" else ())] * 2
    assert models.cost(met) == pytest.approx(exchange_seconds(met), rel=0.05)
    assert 0 < models.sigma(met) < 0.2


def test_what_moves_as_much_takes_as_long():
    models, _ = fit_exchanges(exchange_samples("all_to_all"), REFERENCE)
    uneven = [Exchange("all_to_all_v", 0, (700, 500_000)), Exchange("all_to_all_v", 0, (1_500_000, 10))]
    even = [Exchange("all_to_all", 2_000_000)] * 2  # a rank keeps half of it
    assert models.cost(uneven) == pytest.approx(models.cost(even), rel=0.1)


def test_disturbed_samples_and_kinds_with_few_say_nothing():
    few = exchange_samples("all_gather", 3) + [
        exchange_sample([Exchange("broadcast", 4 << n)] * 2, spread=3.0) for n in range(10, 20)
    ]
    models, errors = fit_exchanges(few, REFERENCE)
    assert not models.seconds and not errors


def test_what_was_not_measured_is_refused_with_what_was():
    models, _ = fit_exchanges(exchange_samples("all_reduce"), REFERENCE)
    with pytest.raises(TraincastError, match=r"all_gather between 2 ranks was not measured \(measured: 2 all_reduce\)"):
        models.cost([Exchange("all_gather", 10)] * 2)
    with pytest.raises(TraincastError, match=r"all_reduce between 3 ranks was not measured"):
        models.cost([Exchange("all_reduce", 10)] * 3)
    with pytest.raises(TraincastError, match=r"\(measured: none\)"):
        ExchangeModels().cost([Exchange("all_reduce", 10)] * 2)
