"""Fine-tuning steps of LitGPT as its recipes run them: what the captures of `suites/captured_litgpt` were made from.

LitGPT itself is imported (its tree of 27 September 2024, when the published table was complete); bitsandbytes, which
has no kernels without a GPU, is stood in for by the autograd function below. `python -m
traincast_evaluation.published.litgpt_steps FOLDER [NAME...]` captures anew.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from traincast.capturing import capture_distributed, capture_step
from traincast.ir.file import save_workload

_TOKENS = 512
_EVERYWHERE = ("query", "key", "value", "projection", "mlp", "head")
_ATTENTION = ("query", "value")
_STEADY, _STEADY_SHARDED = 2, 3  # micro-batches after which accumulating more changes nothing


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe of `config_hub/finetune`: `batches` accumulate to an update on each of `gpus`; adapters have `rank` and
    `dropout` and are added `at` these layers."""

    model: str
    kind: str
    micro_batch: int
    batches: int
    rank: int = 0
    dropout: float = 0.05
    at: tuple[str, ...] = _ATTENTION
    gpus: int = 1


RECIPES = {
    "gemma-2b-full": Recipe("Gemma-2b", "full", 1, 4, gpus=4),
    "gemma-2b-qlora": Recipe("Gemma-2b", "qlora", 2, 3, 16, 0.1, _EVERYWHERE),
    "gemma-2-2b-qlora": Recipe("Gemma-2-2b", "qlora", 2, 3, 16, 0.1, _EVERYWHERE),
    "gemma-7b-lora": Recipe("Gemma-7b", "lora", 1, 6, 16, 0.1, _EVERYWHERE),
    "gemma-7b-qlora": Recipe("Gemma-7b", "qlora", 1, 6, 16, 0.1, _EVERYWHERE),
    "gemma-2-9b-lora": Recipe("Gemma-2-9b", "lora", 1, 6, 16, 0.1, _EVERYWHERE),
    "llama-2-7b-full": Recipe("Llama-2-7b-hf", "full", 4, 4, gpus=4),
    "llama-2-7b-lora": Recipe("Llama-2-7b-hf", "lora", 2, 4, 32),
    "llama-2-7b-qlora": Recipe("Llama-2-7b-hf", "qlora", 2, 4, 32),
    "llama-3-8b-lora": Recipe("Llama-3-8B", "lora", 1, 8, 32),
    "llama-3-8b-qlora": Recipe("Llama-3-8B", "qlora", 2, 4, 32),
    "llama-3.1-8b-full": Recipe("Llama-3.1-8B", "full", 4, 16),
    "llama-3.2-1b-lora": Recipe("Llama-3.2-1B", "lora", 1, 8, 32),
    "llama-3.2-3b-lora": Recipe("Llama-3.2-3B", "lora", 1, 8, 32),
    "llama-3.2-3b-qlora": Recipe("Llama-3.2-3B", "qlora", 2, 4, 32),
    "mistral-7b-lora": Recipe("Mistral-7B-v0.1", "lora", 2, 4, 32),
    "mistral-7b-qlora": Recipe("Mistral-7B-v0.1", "qlora", 2, 4, 32),
    "mistral-7b-v0.2-lora": Recipe("Mistral-7B-v0.2", "lora", 2, 4, 32),
    "mistral-7b-v0.2-qlora": Recipe("Mistral-7B-v0.2", "qlora", 2, 4, 32),
    "phi-2-full": Recipe("phi-2", "full", 4, 1, gpus=2),
    "phi-2-lora": Recipe("phi-2", "lora", 4, 2, 8, at=_EVERYWHERE),
    "phi-2-qlora": Recipe("phi-2", "qlora", 4, 2, 8, at=_EVERYWHERE),
    "phi-3-qlora": Recipe("Phi-3-mini-4k-instruct", "qlora", 4, 2, 8, at=_EVERYWHERE),
    "stablelm-base-alpha-3b-full": Recipe("stablelm-base-alpha-3b", "full", 1, 4, gpus=2),
    "stablelm-base-alpha-3b-lora": Recipe("stablelm-base-alpha-3b", "lora", 1, 8, 32),
    "stablelm-base-alpha-3b-qlora": Recipe("stablelm-base-alpha-3b", "qlora", 1, 8, 32),
    "tiny-llama-full": Recipe("tiny-llama-1.1b", "full", 4, 8),
    "tiny-llama-lora": Recipe("tiny-llama-1.1b", "lora", 8, 1, 32, at=_EVERYWHERE),
    "tiny-llama-qlora": Recipe("tiny-llama-1.1b", "qlora", 8, 1, 32, at=_EVERYWHERE),
}


class _MatMul4Bit(torch.autograd.Function):
    """bitsandbytes 0.42: the input stays on the context, and so lives until the loss is given a new value."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, shape: tuple[int, int], bias: Any) -> torch.Tensor:
        ctx.shape, ctx.tensors = shape, (x, packed)
        return nn.functional.linear(x, _dequantise(packed, shape).to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        weight = _dequantise(ctx.tensors[1], ctx.shape).to(gradients[0].dtype)
        return torch.matmul(gradients[0], weight), None, None, None


def _dequantise(packed: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    return packed.view(-1, 1).expand(-1, 2).to(torch.float16).view(shape)


class _Linear4bit(nn.Module):
    """A layer in NF4: half a byte per weight, an fp32 scale for 64 of them."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        count = in_features * out_features
        self.weight = nn.Parameter(torch.empty(count // 2, dtype=torch.uint8), requires_grad=False)
        self.absmax = nn.Parameter(torch.empty(count // 64, dtype=torch.float32), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product with the weights made 16-bit again."""
        shape = (self.out_features, self.in_features)
        result: torch.Tensor = _MatMul4Bit.apply(x, self.weight, shape, self.bias)  # type: ignore[no-untyped-call]
        return result


def _build_model(recipe: Recipe) -> nn.Module:
    """The model in bf16 as Fabric's "bf16-true" makes it."""
    import litgpt.lora
    import litgpt.model

    module = litgpt.model if recipe.kind == "full" else litgpt.lora
    options: dict[str, Any] = {f"lora_{name}": True for name in recipe.at}
    options |= {"lora_r": recipe.rank, "lora_alpha": 16, "lora_dropout": recipe.dropout}
    config = module.Config.from_name(recipe.model, **({} if recipe.kind == "full" else options))
    linear = nn.Linear
    torch.set_default_dtype(torch.bfloat16)
    try:
        if recipe.kind == "qlora":
            torch.nn.Linear = _Linear4bit  # type: ignore[assignment, misc]
        with torch.device("cuda"):
            model: nn.Module = module.GPT(config)
    finally:
        torch.nn.Linear = linear  # type: ignore[misc]
        torch.set_default_dtype(torch.float32)
    if recipe.kind != "full":
        litgpt.lora.mark_only_lora_as_trainable(model)
    model.max_seq_length = _TOKENS  # type: ignore[assignment]
    return model


def _shard_model(model: nn.Module, rank: int, world_size: int) -> nn.Module:
    """FSDP around every block, each computed again, as the recipe for full fine-tuning asks Fabric for."""
    import litgpt.model
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    torch.distributed.init_process_group("nccl", rank=rank, world_size=world_size)
    half, block = torch.bfloat16, litgpt.model.Block
    sharded = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({block}), use_orig_params=True, limit_all_gathers=True, device_id=rank,
        mixed_precision=MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half),
    )  # fmt: skip
    apply_activation_checkpointing(
        sharded, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda one: isinstance(one, block)
    )
    return sharded


def make_step(recipe: Recipe, rank: int = 0, world_size: int = 1) -> Callable[[], None]:
    """A step of a recipe: its names live on from micro-batch to micro-batch as they do in LitGPT's loop."""
    from litgpt.utils import chunked_cross_entropy

    model = _build_model(recipe)
    if world_size > 1:
        model = _shard_model(model, rank, world_size)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4, weight_decay=0.0)
    tokens = torch.zeros(recipe.micro_batch, _TOKENS, dtype=torch.int64, device="cuda")
    batches = min(recipe.batches, _STEADY if world_size == 1 else _STEADY_SHARDED)
    logits: Any = None
    loss: Any = None

    def step() -> None:
        nonlocal logits, loss
        for batch in range(batches):
            held = world_size > 1 and batch + 1 < batches
            with model.no_sync() if held else nullcontext():  # type: ignore[operator]
                if recipe.kind == "full":
                    logits = model(tokens).float()  # Fabric makes results fp32
                    loss = chunked_cross_entropy(logits[..., :-1, :], tokens[..., 1:])
                else:
                    logits = [one.float() for one in model(tokens, lm_head_chunk_size=128)]
                    logits[-1] = logits[-1][..., :-1, :]
                    loss = chunked_cross_entropy(logits, tokens[..., 1:])
                (loss / batches).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def capture_recipe(name: str, folder: Path) -> None:
    """Captures the step of a recipe, that of its first rank, into a folder."""
    recipe = RECIPES[name]
    options: dict[str, Any] = {"batch_size": recipe.micro_batch, "name": f"litgpt-{name}", "rebatch": False}
    if recipe.gpus == 1:
        workload = capture_step(lambda batch_size: make_step(recipe), **options)
    else:
        workload = capture_distributed(
            lambda batch_size, rank, world_size: make_step(recipe, rank, world_size), world_size=recipe.gpus,
            ranks=[0], **options,
        )  # fmt: skip
    save_workload(workload, folder / f"{name}.tc")


if __name__ == "__main__":
    for one in sys.argv[2:] or RECIPES:
        print(one, flush=True)
        capture_recipe(one, Path(sys.argv[1]))
