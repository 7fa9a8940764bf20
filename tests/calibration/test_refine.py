"""A built-in GPU refined by a store: simulated, since nobody here has the GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from tests.calibration.bench.test_store import HERE
from traincast.app.api import fit_store, predict, refine
from traincast.app.cli.main import main
from traincast.calibration.bench.collectives import KINDS, plan_collectives, plan_copies
from traincast.calibration.bench.parts import make_collective_key
from traincast.calibration.bench.plans import plan_benchmarks
from traincast.calibration.bench.signatures import make_overhead_signature
from traincast.calibration.bench.store import Store
from traincast.calibration.refine import _find_only_kernel
from traincast.costs.collectives import COLLECTIVE, load_shipped_collectives, share_bytes_evenly
from traincast.costs.cpu.collectives import make_collective_signature
from traincast.costs.cpu.samples import Sample
from traincast.costs.host.profile import load_host_profile
from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.cost import price_calls
from traincast.hardware.platform import add_default_links, load_platform
from traincast.utils.errors import TraincastError

V100 = replace(HERE, device="cuda", name="Tesla V100-SXM2-32GB")
SLOWER = {"gemm": 1.3}


def store_of(folder, number, seed=0):
    """A GPU whose GEMMs take 1.3 times as long as the shipped model of a V100 says, the rest as long; 5 % noise."""
    device, random = load_platform("v100").device, np.random.default_rng(seed)
    store = Store(folder, V100)
    for count, task in enumerate(plan_benchmarks(seed, ("gemm", "relu"))):
        bare = Sample(
            signature=task.signature, between=1 << 20, access="", wall=1.0, busy=1.0, reference_wall=1.0,
            reference_busy=1.0, spread=0.0,
        )  # fmt: skip
        call = _find_only_kernel(bare)
        if call is not None:
            true = float(price_calls(Calls.of(call.family, [call]), device)[0].seconds[0])
            seconds = true * SLOWER.get(call.family.name, 1.0) * float(np.exp(0.05 * random.normal()))
            store.append(f"key-{count}", replace(bare, wall=seconds, busy=seconds))
        if len(store) == number:
            break


def test_many_samples_are_believed_and_few_only_a_little(tmp_path):
    store_of(tmp_path / "many", 120)
    store_of(tmp_path / "few", 5)
    many, few = (refine(tmp_path / name, "v100", out=tmp_path / f"{name}.toml") for name in ("many", "few"))
    believed = {row.family: row for row in many.corrections}
    assert believed["gemm"].factor == pytest.approx(1.3 ** (100 / 110), rel=0.04)
    assert believed["gemm"].error_after < 0.4 * believed["gemm"].error_before
    assert believed["elementwise"].factor == pytest.approx(1.0, abs=0.05)
    assert 1.0 < few.corrections[0].factor < 1.15
    assert "times the prediction: corrected by" in many.headline()


def test_copies_correct_their_family(tmp_path):
    device, store = load_platform("v100").device, Store(tmp_path / "store", V100)
    for number in range(40):
        task = next(islice(plan_copies("cuda"), number, None))
        bare = Sample(
            signature=task.signature, between=0, access="", wall=1.0, busy=1.0, reference_wall=1.0, reference_busy=1.0,
            spread=0.0,
        )  # fmt: skip
        call = _find_only_kernel(bare)
        assert call is not None
        seconds = 2.0 * float(price_calls(Calls.of(call.family, [call]), device)[0].seconds[0])
        store.append(task.key, replace(bare, wall=seconds, busy=seconds))
    (row,) = refine(tmp_path / "store", "v100", out=tmp_path / "mine.toml").corrections
    assert row.measured == pytest.approx(2.0) and row.factor == pytest.approx(2.0 ** (40 / 50), rel=1e-6)


def sample_of(signature, seconds, ranks=1, spread=0.0):
    return Sample(
        signature=signature, between=0, access="", wall=seconds, busy=seconds, reference_wall=1.0, reference_busy=1.0,
        spread=spread, ranks=ranks,
    )  # fmt: skip


def collectives_of(folder, platform, ranks, factor, number=140):
    """A node on which collectives take `factor` times what its shipped curves say."""
    topology, store = add_default_links(load_platform(platform)).topology, Store(folder, V100)
    for exchanges in islice(plan_collectives(ranks), number):
        first = exchanges[0]
        size = share_bytes_evenly([exchange.sent for exchange in exchanges]) if first.sent else first.message_bytes
        call = Calls.from_columns(COLLECTIVE, [first.kind], ["fp32"], np.array([[size, ranks, 1.0]]))
        seconds = factor * float(load_shipped_collectives().predict(call, topology).seconds[0])
        store.append(make_collective_key(exchanges), sample_of(make_collective_signature(exchanges), seconds, ranks))


def test_collectives_correct_each_kind_and_steps_of_several_gpus(tmp_path):
    collectives_of(tmp_path / "store", "dgx1-v100", 4, 1.2)
    refined = refine(tmp_path / "store", "dgx1-v100", out=tmp_path / "mine.toml")
    rows = {row.family: row for row in refined.corrections}
    assert set(rows) == {f"collective {kind}" for kind in KINDS}
    for row in rows.values():
        assert row.measured == pytest.approx(1.2) and row.factor == pytest.approx(1.2 ** (20 / 30))
    mine = load_platform(str(tmp_path / "mine.toml"))
    plain = load_platform("dgx1-v100")
    sizes = np.array([[1e6, 4.0, 1.0], [1e6, 16.0, 2.0]])
    for kind, inside in (("all_reduce", 1.2 ** (20 / 30)), ("barrier", 1.2 ** (20 / 30)), ("one_shot_all_reduce", 1.0)):
        call = Calls.from_columns(COLLECTIVE, [kind] * 2, ["fp32"] * 2, sizes)
        slower, before = (load_shipped_collectives().predict(call, node.topology).seconds for node in (mine, plain))
        assert (slower / before).tolist() == pytest.approx([inside, 1.0], rel=1e-4), (
            "between nodes nothing was measured"
        )
    slower, before = (
        predict("dlrm-ddp", on=on, gpus=4, batch_size=65536) for on in (str(tmp_path / "mine.toml"), "dgx1-v100")
    )
    assert slower.iteration > before.iteration


def test_the_host_is_corrected_by_its_overheads(tmp_path):
    host, store = load_host_profile(load_platform("v100").device.host), Store(tmp_path / "store", V100)
    times = [("T1", "python", host.t1["python"]), ("T4", "launch", host.t4["launch"]), ("T4", "synchronize", 1.0)]
    times += [("T2", op, seconds) for op, seconds in list(host.t2.items())[2:40]]
    times += [("T2", "aten::nobody_measured", 1.0)]
    for number, (kind, name, seconds) in enumerate(times):
        store.append(f"key-{number}", sample_of(make_overhead_signature(kind, name), 1.2 * seconds, spread=0.9))
    (row,) = refine(tmp_path / "store", "v100", out=tmp_path / "mine.toml").corrections
    assert (row.family, row.samples, row.measured) == ("host", 40, pytest.approx(1.2))
    assert row.factor == pytest.approx(1.2 ** (40 / 50))
    mine, plain = (predict("dlrm-default", on=on, batch_size=1) for on in (str(tmp_path / "mine.toml"), "v100"))
    assert mine.host / plain.host == pytest.approx(row.factor, rel=0.01)


def test_a_refined_platform_is_refined_once_more(tmp_path):
    for name, factor, base in (("first", 1.2, "dgx1-v100"), ("second", 1.5, str(tmp_path / "first.toml"))):
        collectives_of(tmp_path / name, "dgx1-v100", 2, factor, 70)
        refine(tmp_path / name, base, out=tmp_path / f"{name}.toml")
    first, second = (load_platform(str(tmp_path / f"{name}.toml")).topology for name in ("first", "second"))
    weight = 10 / 20
    assert dict(first.corrections)["all_reduce"] == pytest.approx(1.2**weight, rel=1e-3)
    assert dict(second.corrections)["all_reduce"] == pytest.approx(
        (1.5 / 1.2**weight) ** weight * 1.2**weight, rel=1e-3
    )


def test_a_store_of_another_gpu_than_the_one_named_is_told_of(tmp_path):
    collectives_of(tmp_path / "store", "h100", 2, 1.0, 7)
    assert refine(tmp_path / "store", "h100", out=tmp_path / "mine.toml").notes[0] == (
        "the store is of a 'Tesla V100-SXM2-32GB' and h100 describes a 'NVIDIA H100 80GB HBM3'"
    )
    collectives_of(tmp_path / "wild", "h100", 2, 1e9, 70)
    with pytest.raises(TraincastError, match=r"takes 1e\+09 times what h100 predicts: the store is of a 'Tesla V100"):
        refine(tmp_path / "wild", "h100")


def test_a_store_of_a_locked_clock_is_compared_at_that_clock(tmp_path):
    device = load_platform("v100").device
    store = Store(tmp_path / "store", replace(V100, locked_clock_mhz=900.0))
    for count, task in enumerate(islice(plan_benchmarks(0, ("gemm",)), 40)):
        call = _find_only_kernel(sample_of(task.signature, 1.0))
        if call is not None:
            seconds = float(price_calls(Calls.of(call.family, [call]), device.with_clock(900.0))[0].seconds[0])
            store.append(f"key-{count}", sample_of(task.signature, seconds))
    refined = refine(tmp_path / "store", "v100", out=tmp_path / "mine.toml")
    assert refined.corrections[0].measured == pytest.approx(1.0)
    assert "measured at 900 MHz: compared with v100 at that clock" in refined.headline()


def test_a_gpus_store_is_not_fitted_as_a_cpu(tmp_path):
    store_of(tmp_path / "store", 20)
    with pytest.raises(TraincastError, match=r"is of a GPU \(Tesla V100-SXM2-32GB\).*give `refine`"):
        fit_store(tmp_path / "store")


def test_a_refined_gpu_predicts_longer_products_and_nothing_else(tmp_path):
    store_of(tmp_path / "store", 120)
    refine(tmp_path / "store", "v100", out=tmp_path / "mine.toml")
    plain = predict("dlrm-default", on="v100").by_family
    refined = predict("dlrm-default", on=str(tmp_path / "mine.toml")).by_family
    assert refined["gemm"] / plain["gemm"] == pytest.approx(1.27, abs=0.05)
    assert refined["embedding"] == pytest.approx(plain["embedding"])


def test_the_command_line_refines(tmp_path, capsys):
    store_of(tmp_path / "store", 20)
    out = tmp_path / "mine.toml"
    assert main(["fit", "--store", str(tmp_path / "store"), "--refine", "v100", "--out", str(out)]) == 0
    assert f"{out}: v100, refined" in capsys.readouterr().out


def test_a_store_of_a_cpu_refines_no_gpu(tmp_path):
    store = Store(tmp_path, HERE)
    store.append("a", Sample(signature=None, between=0, access="", wall=1, busy=1, reference_wall=1,
                             reference_busy=1, spread=0))  # fmt: skip
    with pytest.raises(TraincastError, match="holds no samples of a GPU"):
        refine(tmp_path, "v100")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('refines = "v100"\n', "has no .corrections."),
        ('refines = "v100"\n[corrections]\ngemm = 90.0\n', "corrects 'gemm' by 90"),
        ('refines = "v100"\nclock = 3\n[corrections]\ngemm = 1.0\n', "unknown field 'clock'"),
        ('refines = "v1000"\n[corrections]\ngemm = 1.0\n', "unknown platform 'v1000'"),
    ],
)
def test_a_refinement_that_makes_no_sense_is_one_line(tmp_path, text, said):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(TraincastError, match=said):
        load_platform(str(tmp_path / "mine.toml"))
