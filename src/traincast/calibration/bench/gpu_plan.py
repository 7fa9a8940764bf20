"""What is measured on a GPU: the kinds of op that a CPU is measured with, half of them at the sizes and in the types
that keep a GPU busy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from traincast.calibration.bench.plans import Task, plan_benchmarks
from traincast.calibration.bench.signatures import Random, draw_size, make_op, make_spec
from traincast.costs.cpu.features import get_kind
from traincast.ir.ops import Signature

_TYPES = ("float32", "bfloat16", "float16")
_ENLARGED = 0.5  # of the samples; launches of small ones are a part of steps too
_LEAST_FLOPS, _MOST_FLOPS = 1e9, 4e11  # of a product: 20 ms of an A100 in fp32
_MOST_BYTES = 1 << 28  # of a tensor


def plan_gpu_benchmarks(seed: int = 0) -> Iterator[Task]:
    """Microbenchmarks without end; the same for the same seed."""
    for number, task in enumerate(plan_benchmarks(seed)):
        random = np.random.default_rng((seed, 17, number))
        yield (
            replace(task, signature=_enlarge_signature(task.signature, random)) if random.random() < _ENLARGED else task
        )


def _enlarge_signature(signature: Signature, random: Random) -> Signature:
    """Products and ops on tensors of one shape, larger and in one of the types that models are trained in; others as
    they are."""
    dtype = str(random.choice(_TYPES))
    if get_kind(signature) == "gemm":
        return _enlarge_gemm(signature, random, dtype)
    tensors = (*signature.inputs, *signature.outputs)
    shape = tensors[0].shape
    if not shape or any(one.shape != shape or one.dtype != "float32" or not one.is_contiguous for one in tensors):
        return signature
    most = _MOST_BYTES // max(tensors[0].nbytes, 1)
    longer = make_spec(shape[0] * max(1, min(most, 1 << int(random.integers(9)))), *shape[1:], dtype=dtype)
    return replace(signature, inputs=(longer,) * len(signature.inputs), outputs=(longer,) * len(signature.outputs))


def _enlarge_gemm(signature: Signature, random: Random, dtype: str) -> Signature:
    while True:
        m, n, k = draw_size(random, 128, 65536), draw_size(random, 64, 16384), draw_size(random, 64, 16384)
        if _LEAST_FLOPS < 2.0 * m * n * k < _MOST_FLOPS:
            break
    out = make_spec(m, n, dtype=dtype)
    if signature.name == "aten::addmm":
        weight = make_spec(k, n, dtype=dtype, transposed=True)
        tensors = [("self", make_spec(n, dtype=dtype)), ("mat1", make_spec(m, k, dtype=dtype)), ("mat2", weight)]
        return make_op("addmm", tensors, [out], beta=1, alpha=1)
    left, right = (not given.is_contiguous for given in signature.inputs)
    tensors = [
        ("self", make_spec(m, k, dtype=dtype, transposed=left)),
        ("mat2", make_spec(k, n, dtype=dtype, transposed=right)),
    ]
    return make_op("mm", tensors, [out])
