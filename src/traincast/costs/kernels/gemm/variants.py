"""Products that are made of others: one expert after the other, all experts in one kernel, sums onto a gradient."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from traincast.costs.kernels.call import Calls, Estimate
from traincast.costs.kernels.gemm.engine import DRAM_SHARE
from traincast.hardware.device import Device
from traincast.utils.arrays import FloatArray

ACCUMULATING = ("accumulate", "looped_accumulate")
LOOPED = ("looped", "looped_accumulate")
_GRADIENT_BYTES = 8.0  # of an element that is read and written in fp32
_HIDDEN = 0.6  # share of the shorter of product and gradient traffic that hides: B200, see docs/evidence/kernels.md
_VARIANT_SIGMA = 0.12  # log-sigma of these rules, from the rows of kernels/b200_efficiency that set them


def plain(calls: Calls) -> Calls:
    """The products that the calls are made of: of a loop, one turn."""
    looped = calls.is_kind(*LOOPED)
    if not looped.any():
        return calls
    values = calls.values.copy()
    values[looped, calls.family.fields.index("batch")] = 1.0
    return replace(calls, values=values)


def combined(calls: Calls, products: Estimate, device: Device) -> Estimate:
    """The estimate of the calls from that of their `plain` products."""
    variant = calls.kind >= calls.family.kinds.index("accumulate")
    if not variant.any():
        return products
    seconds = products.seconds * np.where(calls.is_kind(*LOOPED), np.maximum(calls["batch"], 1.0), 1.0)
    seconds = np.where(calls.is_kind(*ACCUMULATING), _onto_gradient(calls, seconds, device), seconds)
    sigma = np.where(variant, np.hypot(products.sigma, _VARIANT_SIGMA), products.sigma)
    in_domain = products.in_domain & ~calls.is_kind("grouped")
    return replace(products, seconds=seconds, sigma=sigma, in_domain=in_domain)


def _onto_gradient(calls: Calls, seconds: FloatArray, device: Device) -> FloatArray:
    """Products whose results are added to a gradient in fp32, which is read and written."""
    elements = np.maximum(calls["batch"], 1.0) * calls["m"] * calls["n"]
    traffic = _GRADIENT_BYTES * elements / (DRAM_SHARE * device.dram_bandwidth)
    return np.asarray(np.maximum(seconds, traffic) + (1.0 - _HIDDEN) * np.minimum(seconds, traffic))
