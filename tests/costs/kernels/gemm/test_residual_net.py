"""The network that corrects a physical estimate: how it is asked, averaged and trained."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from traincast.costs.kernels.contract import load_state
from traincast.costs.kernels.families import PROFILES
from traincast.costs.kernels.gemm.model import EngineFit, GemmModel
from traincast.hardware import load_device


@pytest.fixture(scope="module")
def fit() -> EngineFit:
    return GemmModel.from_state(load_state(PROFILES / "gemm")).engines_["simt"]


def features_of(fit: EngineFit, n: int) -> np.ndarray:
    net = fit.nets[0]
    spread = np.where(net.scale > 0, 1 / np.maximum(net.scale, 1e-9), 0.0)
    random = np.random.default_rng(1).standard_normal((len(net.mean), n))
    return (net.mean[:, None] + spread[:, None] * random).astype(np.float32)


def test_a_call_is_corrected_alike_alone_and_among_many(fit):
    features = features_of(fit, 1300)  # more than two blocks, and a part of one
    net, code = fit.nets[0], fit.nets[0].codes[0]
    alone = [net.correction(features[:, i : i + 1], code)[0] for i in (0, 511, 512, 1299)]
    assert net.correction(features, code)[[0, 511, 512, 1299]] == pytest.approx(alone, abs=1e-5)


def test_an_engine_takes_the_mean_of_its_networks(fit):
    features, t4 = features_of(fit, 50), load_device("t4")
    row = fit.chips.find(t4)
    each = [replace(fit, nets=(net,)).correction(features, row, t4) for net in fit.nets]
    assert len(each) > 1
    assert np.ptp(each, axis=0).max() > 0.01, "networks that agree everywhere are one too many"
    assert fit.correction(features, row, t4) == pytest.approx(np.mean(each, axis=0), abs=1e-6)


def test_a_chip_never_measured_is_seen_as_the_mean_of_its_side_of_volta(fit):
    features, h100 = features_of(fit, 50), load_device("h100")
    newer = [i for i, arch in enumerate(fit.chips.archs) if arch not in ("maxwell", "pascal")]
    expected = np.mean([net.correction(features, net.codes[newer].mean(axis=0)) for net in fit.nets], axis=0)
    assert fit.correction(features, fit.chips.find(h100), h100) == pytest.approx(expected, abs=1e-6)
