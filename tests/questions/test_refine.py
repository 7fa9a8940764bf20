"""A built-in GPU refined by a store: simulated, since nobody here has the GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from tests.benching.test_store import HERE
from traincast.api import fit_store, predict, refine
from traincast.benching.copies import copy_plan
from traincast.benching.plans import plan
from traincast.benching.store import Store
from traincast.calibration.samples import Sample
from traincast.cli.main import main
from traincast.errors import TraincastError
from traincast.kernels.call import Calls
from traincast.kernels.cost import price_calls
from traincast.platform.platform import load_platform
from traincast.questions.refine import _only_kernel

V100 = replace(HERE, device="cuda", name="Tesla V100-SXM2-32GB")
SLOWER = {"gemm": 1.3}


def store_of(folder, number, seed=0):
    """A GPU whose products take 1.3 times as long as the shipped model of a V100 says, the rest as long; 5 % noise."""
    device, random = load_platform("v100").device, np.random.default_rng(seed)
    store = Store(folder, V100)
    for count, task in enumerate(plan(seed, ("gemm", "relu"))):
        bare = Sample(
            signature=task.signature, between=1 << 20, access="", wall=1.0, busy=1.0, reference_wall=1.0,
            reference_busy=1.0, spread=0.0,
        )  # fmt: skip
        call = _only_kernel(bare)
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
        task = next(islice(copy_plan("cuda"), number, None))
        bare = Sample(
            signature=task.signature, between=0, access="", wall=1.0, busy=1.0, reference_wall=1.0, reference_busy=1.0,
            spread=0.0,
        )  # fmt: skip
        call = _only_kernel(bare)
        assert call is not None
        seconds = 2.0 * float(price_calls(Calls.of(call.family, [call]), device)[0].seconds[0])
        store.append(task.key, replace(bare, wall=seconds, busy=seconds))
    (row,) = refine(tmp_path / "store", "v100", out=tmp_path / "mine.toml").corrections
    assert row.measured == pytest.approx(2.0) and row.factor == pytest.approx(2.0 ** (40 / 50), rel=1e-6)


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
