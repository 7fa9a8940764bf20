"""Hosts by the names of their CPUs."""

from __future__ import annotations

import pytest

from traincast.costs.host.profile import SERVER, find_cpu, list_cpus, load_host_profile
from traincast.utils.errors import TraincastError


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("AMD EPYC 7742 64-Core Processor", "amd epyc 7742"),
        ("Intel(R) Xeon(R) Gold 6230 CPU @ 2.10GHz", "intel xeon gold 6230"),
        ("Intel(R) Xeon(R) Platinum 8480+", "intel xeon platinum 8480"),
        ("Intel Core Processor (Broadwell)", "intel core broadwell"),
    ],
)
def test_a_cpu_is_found_as_systems_name_it(text, name):
    cpu = find_cpu(text)
    assert cpu is not None
    assert cpu.name == name


def test_newer_and_faster_cpus_take_less():
    slowness = [find_cpu(name).slowness for name in ("Xeon E5-2698 v4", "EPYC 7742", "EPYC 7763", "EPYC 9654")]
    assert slowness == sorted(slowness, reverse=True)
    assert find_cpu("EPYC 9654").slowness == pytest.approx(0.93, abs=0.03), "as traces of it show"


def test_a_model_that_is_not_listed_runs_at_its_generations_clock_or_the_one_its_name_states():
    assert find_cpu("Xeon Gold 6126").slowness > find_cpu("Xeon Gold 6230").slowness
    slow, fast = (find_cpu(f"Intel(R) Xeon(R) CPU @ {clock}GHz").slowness for clock in ("2.00", "3.00"))
    assert slow == pytest.approx(1.5**0.7 * fast)


@pytest.mark.parametrize("name", list_cpus())
def test_every_listed_model_has_a_generation(name):
    assert find_cpu(name) is not None


def test_a_host_by_its_cpu_is_the_servers_profile_scaled_and_less_certain():
    server, host = load_host_profile(SERVER), load_host_profile("AMD EPYC 7742")
    assert host.t4["launch"] == pytest.approx(find_cpu("AMD EPYC 7742").slowness * server.t4["launch"])
    assert host.spread > server.spread
    assert host.name == "amd epyc 7742"


def test_a_host_that_is_neither_is_named():
    with pytest.raises(TraincastError, match=r"unknown host 'abacus'\. Name a CPU as its system does"):
        load_host_profile("abacus")
