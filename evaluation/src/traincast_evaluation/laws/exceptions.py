"""Where a law does not hold, and why: the physics of each exception. What is not listed is a violation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from traincast.simulator.scenario.scenario import Scenario


@dataclass(frozen=True)
class LawException:
    """Scenarios (`holds`) in which a law may be broken by up to a factor (`most`), and the physics of it."""

    law: str
    most: float
    holds: Callable[[Scenario], bool]
    physics: str


def _is_recommender(s: Scenario) -> bool:
    return str(s.workload).startswith(("dlrm", "wide-deep", "deepfm", "din", "ncf", "hstu", "onetrans"))


def _count_data_ranks(s: Scenario) -> int:
    return (s.gpus or 1) // ((s.tp or 1) * (s.pp or 1) * (s.cp or 1))


def _is_one_pass(s: Scenario) -> bool:
    samples = (s.micro_batch or 1) * _count_data_ranks(s)
    return s.global_batch is not None and s.global_batch <= samples


def _has_several_gpus(s: Scenario) -> bool:
    return (s.gpus or 1) > 1


def _always(_: Scenario) -> bool:
    return True


EXCEPTIONS: tuple[LawException, ...] = (
    LawException(
        "optimizer", 5.0, _is_recommender,
        "Fused tables are updated by their backward kernel. Without an optimizer, or with one that PyTorch runs by "
        "itself, gradients of tables are tensors that are written, kept and read.",
    ),
    LawException(
        "mode: less memory", 1e3, lambda s: _is_recommender(s) and _has_several_gpus(s),
        "Training divides embedding tables among the GPUs; for inference every GPU holds the whole model.",
    ),
    LawException(
        "zero: less memory", 1.2, lambda s: _count_data_ranks(s) == 1,
        "With one data-parallel rank nothing is divided, and gathered parameters are still copies.",
    ),
    LawException(
        "micro_batch: more memory", 1.2, _is_one_pass,
        "A step of one pass has no accumulated gradients beside those that its backward pass makes.",
    ),
    LawException(
        "dropout: more memory", 1.02, lambda s: s.checkpoint is not None,
        "Dropout after the embedding makes a new tensor, and the one before it is freed ahead of the peak.",
    ),
    LawException(
        "roofline_only", 2.25, lambda s: str(s.workload) in ("vgg13", "resnet50", "inception-v3"),
        "Winograd's convolutions multiply 2.25 times less often than a roofline counts.",
    ),
    LawException(
        "roofline_only", 1.15, _always,
        "A roofline reads at the bandwidth of device memory; measured kernels find what the one before wrote in L2.",
    ),
    LawException(
        "twice the GPUs, the same samples", 10.0, lambda s: "no-peer" in str(s.on),
        "Without peer access all bytes go through host memory: measured, an all-reduce of 512 MiB takes 27 ms on two "
        "L40S, 156 on four and 649 on eight.",
    ),
    LawException(
        "twice the GPUs, the same samples", 1.6, _has_several_gpus,
        "A step that is nearly all communication: more ranks have more latencies one after the other.",
    ),
    LawException(
        "twice the GPUs and samples: slower", 1.25, _is_recommender,
        "Tables are placed whole: on more GPUs the busiest one has fewer of them.",
    ),
    LawException(
        "twice the GPUs and samples: slower", 1.1, _has_several_gpus,
        "Collectives are measured by the number of ranks; on a whole node NCCL has algorithms that fewer ranks lack.",
    ),
    LawException(
        "no kernel beats its roof", 1.05, _always,
        "Not physics but a limit of the fit: fp32 products of the A100 are given up to 3 % more than its data sheet.",
    ),
    LawException(
        "one more SM", 1.02, _always,
        "Tiles are chosen by the number of SMs: one more can leave a longer tail in the last wave of a GEMM.",
    ),
    LawException(
        "twice the L2", 1.015, _always,
        "Not physics but a limit of the fit: of all measured chips those with more L2 differ in more than that, and "
        "single GEMMs are given up to 7 % more time.",
    ),
    LawException(
        "fewer bits", 1.4, lambda s: _is_recommender(s) or (s.batch_size or 64) <= 16,
        "Autocast's copies of weights are kernels too: where products have few rows or are narrow they outweigh.",
    ),
    LawException(
        "cuda_graph: faster", 1.01, _has_several_gpus,
        "Kernels that are launched earlier meet collectives that take SMs and memory bandwidth from them.",
    ),
    LawException(
        "batch_size: slower", 1.001, _always,
        "A step that waits for its host ends with its last kernel, which has another tile for more rows.",
    ),
)  # fmt: skip


def find_exception(law: str, scenario: Scenario, factor: float) -> LawException | None:
    """The exception that explains a broken law, or None."""
    for known in EXCEPTIONS:
        if law.startswith(known.law) and factor <= known.most and known.holds(scenario):
            return known
    return None
