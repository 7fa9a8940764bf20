"""Which variant of a workload is asked for, as one value."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypedDict

from traincast.utils.errors import TraincastError, unknown

DTYPES = ("fp32", "tf32", "fp16", "bf16")
MODES = ("training", "inference")
OPTIMIZERS = ("none", "sgd", "adagrad", "adam")
ATTENTIONS = ("eager", "sdpa")
EMBEDDINGS = ("batched", "bag", "fbgemm")

_CHOICES = {
    "dtype": DTYPES, "mode": MODES, "optimizer": OPTIMIZERS, "attention": ATTENTIONS, "embedding": EMBEDDINGS,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A workload's sizes and choices. `None` is the workload's own default.

    `batch_size` is samples per GPU, `seq_len` tokens per sample. `dtype` is the arithmetic: "fp32", "tf32" (products
    in TF32), "fp16" or "bf16" (training under autocast, inference with such weights). `optimizer` "none" leaves the
    update out. `attention` is a choice of Transformers, `embedding` one of DLRMs. `compiled` is the step as
    `torch.compile` of the model would run it.
    """

    batch_size: int | None = None
    seq_len: int | None = None
    dtype: str = "fp32"
    mode: str | None = None
    optimizer: str | None = None
    attention: str | None = None
    embedding: str | None = None
    compiled: bool = False

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            choice = getattr(self, name)
            if choice is not None and choice not in choices:
                raise unknown(name, str(choice), choices, f"Choose from {', '.join(choices)}.")

    @property
    def trains_eagerly(self) -> bool:
        """Whether the step is one of training without a compiler: what can be sharded over GPUs."""
        return self.mode != "inference" and not self.compiled


class VariantOptions(TypedDict, total=False):
    """The fields of `Variant` as keywords of the public calls."""

    batch_size: int | None
    seq_len: int | None
    dtype: str | None
    mode: str | None
    optimizer: str | None
    attention: str | None
    embedding: str | None
    compiled: bool


def variant_of(options: VariantOptions, dtype: str = "fp32") -> Variant:
    """The variant that keywords describe, with this `dtype` where they name none; an unknown one is named with the
    nearest known."""
    known = [field.name for field in fields(Variant)]
    for name in options:
        if name not in known:
            raise unknown("keyword", name, known, f"Choose from {', '.join(known)}.")
    plain: dict[str, Any] = {**options, "dtype": options.get("dtype") or dtype}
    return Variant(**plain)


def check_held(name: str, mode: str, variant: Variant) -> None:
    """Refuses what cannot be chosen any more of a workload that was captured: its mode, optimizer, ops and types."""
    if variant.mode not in (None, mode):
        raise TraincastError(f"{name} holds a step of {mode}, not {variant.mode}; capture it again for {variant.mode}")
    if variant.optimizer not in (None, "none"):
        raise TraincastError(f"{name} holds its own optimizer; only `optimizer='none'` can change it")
    if variant.dtype in ("fp16", "bf16"):
        raise TraincastError(
            f"{name} keeps the types it was captured with; capture it under autocast for {variant.dtype}, or ask "
            f"`whatif` with dtype={variant.dtype}"
        )
    for option in ("attention", "embedding"):
        choice = getattr(variant, option)
        if choice is not None:
            raise TraincastError(
                f"{name} keeps the ops it was captured with; leave out `{option}`, or capture the model with {choice}"
            )
