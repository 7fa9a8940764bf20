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


def _has_fewer_passes_than_stages(s: Scenario) -> bool:
    """Whether passes of half this micro-batch are no more than the pipeline's stages."""
    samples = (s.micro_batch or 1) * _count_data_ranks(s)
    return s.global_batch is not None and 2 * s.global_batch <= samples * (s.pp or 1)


def _has_several_gpus(s: Scenario) -> bool:
    return (s.gpus or 1) > 1


def _has_experts(s: Scenario) -> bool:
    return getattr(s.workload, "experts", None) is not None


def _has_no_flash_attention(s: Scenario) -> bool:
    """Whether attention is computed in fp32 or TF32, or has a bias on its scores (T5)."""
    is_captured = isinstance(s.workload, str) and s.dtype not in ("fp16", "bf16")
    return is_captured or str(getattr(s.workload, "name", "")).startswith("t5")


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
        "zero: less memory", 2.0, lambda s: (s.pp or 1) > 1,
        "PyTorch's pipelines do not shard again between micro-batches: FSDP gathers parameters once a step and adds "
        "up whole gradients in the type that they are reduced in, 4 bytes where a lower stage adds up 2.",
    ),
    LawException(
        "zero: less memory", 1.1, lambda s: _count_data_ranks(s) == 2 and "-4-layers" in str(s.workload),
        "Two ranks divide states by two; gathered weights and gradients of two layers are half of a model of four.",
    ),
    LawException(
        "tp: less memory", 1.1, lambda s: not _is_one_pass(s),
        "Twice the tensor-parallel ranks are half the data-parallel ones, which run twice the passes: gradients of the "
        "first are held beside activations of the second. Experts are not divided by them, and outweigh.",
    ),
    LawException(
        "micro_batch: more memory", 1.5, _is_one_pass,
        "A step of one pass has no accumulated gradients beside those that its backward pass makes.",
    ),
    LawException(
        "micro_batch: more memory", 1.05, _has_fewer_passes_than_stages,
        "The first stage of such a pipeline holds all passes of a step. When the first backward pass has made the "
        "gradients, all passes but one are left: of four samples three in passes of one, two in passes of two.",
    ),
    LawException(
        "checkpoint: less memory", 1.02, lambda s: _has_experts(s) and s.checkpoint in ("light", "selective"),
        "What is not computed again are the results of products: those of experts' last ones too, one for each expert "
        "of a token, which backward without recomputation has no need of.",
    ),
    LawException(
        "dropout: more memory", 1.02, lambda s: s.checkpoint is not None or (s.tp or 1) > 1,
        "Dropout after the embedding makes a new tensor, and the one before it is freed ahead of the peak. Where "
        "layers are computed again, or keep only their share, that one is a visible part of what is held.",
    ),
    LawException(
        "twice the GPUs and samples: slower", 2.0, _is_recommender,
        "Tables are placed whole: on twice the GPUs the busiest one has down to half of them.",
    ),
    LawException(
        "twice the GPUs and samples: slower", 1.5, lambda s: bool(s.zero or s.fsdp),
        "Optimizer states are divided among data-parallel ranks: of twice as many each updates half.",
    ),
    LawException(
        "twice the GPUs and samples: less memory", 2.0, _is_recommender,
        "A table that is placed whole is looked up for the samples of all GPUs: indices and results grow with them.",
    ),
    LawException(
        "twice the GPUs and samples: less memory", 1.5, lambda s: _count_data_ranks(s) == 2,
        "With the second data-parallel rank there are gradients to reduce, and buckets that hold them.",
    ),
    LawException(
        "no_reshard: more memory", 1.15, lambda s: s.fsdp is not None or s.zero == 3,
        "Weights that are not gathered again need no buffers to gather into in the backward pass; of models of a few "
        "layers those are more than the weights that are kept, most where the token embedding is one of them.",
    ),
    LawException(
        "loss: same time", 1.5, lambda s: s.kernels is not None,
        "Beside fused or compiled layers the plain loss is one kernel, the eager one several.",
    ),
    LawException(
        "attention: faster", 1.4, _has_no_flash_attention,
        "FlashAttention is for 16 bits without a bias. Else PyTorch takes its memory-efficient kernel, which computes "
        "all scores again in the backward pass, at a lower rate than GEMMs have.",
    ),
    LawException(
        "attention: faster", 1.02, lambda s: s.seq_len is not None and s.seq_len <= 1024,
        "Of short sequences the scores fit in L2, and the fused kernel's second computation of them buys nothing.",
    ),
    LawException(
        "one more SM", 1.04, _always,
        "Tiles are chosen by the number of SMs: one more can leave a longer tail in the last wave of a GEMM, the more "
        "the fewer SMs there are (20 to 30 of a Pascal).",
    ),
    LawException(
        "twice the L2", 1.02, _always,
        "Not physics but a limit of the fit: of all measured chips those with more L2 differ in more than that, and "
        "single GEMMs are given up to 7 % more time.",
    ),
    LawException(
        "kernels of twice the samples", 1.1, lambda s: (s.batch_size or 64) <= 64,
        "For few rows libraries take other kernels: with up to 64 and twice the rows, 21 % of 3,600 measured pairs in "
        "bf16 take over 2 % less time with more on A100, 16 on L40S, 10 on H100, of DeepBench's in fp32 40 % on P100. "
        "The model follows: told to be monotone, its error rises from 4.9 to 6.1, 4.9 to 17.5, 2.0 to 2.2, 15 to 41 %.",
    ),
    LawException(
        "lora_rank", 1.01, _always,
        "As for few rows: of products as narrow as 8 the time may be that of a kernel for wider ones, or more.",
    ),
    LawException(
        "power_limit_w: faster", 1.005, _always,
        "Not physics but a limit of the fit: at a faster clock single small GEMMs are given up to 0.3 % more time.",
    ),
    LawException(
        "clock", 1.005, _always,
        "As for power limits; and kernels that end earlier meet other collectives, which take bandwidth from them.",
    ),
    LawException(
        "cuda_graph: faster", 1.001, _always,
        "A step that never waits for its host gains nothing, and its first kernel waits until the graph is launched.",
    ),
    LawException(
        "cuda_graph: faster", 1.2, lambda s: s.micro_batch is not None,
        "A graph writes to the same addresses each time: gradients are kept, set to zero and added to, where else they "
        "are made anew. That is more element-wise work and memory, most where a step has few tokens.",
    ),
    LawException(
        "cuda_graph: faster", 1.03, _has_several_gpus,
        "Kernels that are launched earlier meet collectives that take SMs and memory bandwidth from them.",
    ),
    *(
        LawException(
            edit, 1.005, _has_several_gpus,
            "What is ready earlier runs beside other kernels and collectives, which share SMs and bandwidth with it.",
        )
        for edit in (
            "compiled", "host-speed", "launch-speed", "link-latency", "link-speed", "loader_ms", "memory-speed",
            "nic-speed", "speed:",
        )
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
