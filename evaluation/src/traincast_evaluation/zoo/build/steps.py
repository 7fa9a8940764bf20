"""One training or inference step of each kind of model, written as a script for a GPU would be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from traincast.models.dlrm.config import DcnConfig, DlrmConfig
from traincast.models.embeddings.access import Uniform, draw_rows, parse_access
from traincast.models.layers.optimizers import LEARNING_RATE
from traincast.utils.errors import TraincastError
from traincast_evaluation.zoo.define.dcn import DlrmDcn
from traincast_evaluation.zoo.define.dlrm import Dlrm
from traincast_evaluation.zoo.define.recommenders import Recommender

M = TypeVar("M", bound=nn.Module)
Step = Callable[[], object]
MakeStep = Callable[[int, int], Step]
Inputs = Callable[[int, int], tuple[torch.Tensor, ...]]
Loss = Callable[..., torch.Tensor]

_LEAST_VOCABULARY = 1000  # token ids that all built-in models know
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.AdamW,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What differs between the files of one model. `precision` is "fp32" or "half" (autocast when training).

    `device` is "cuda", which a capture imitates, or the one that a step is really run on; then inputs are `drawn`, not
    zeros, which one row of a table, one branch of a kernel and little power would do for. As many as `ranks` train
    together, under `DistributedDataParallel`.
    """

    mode: str
    optimizer: str
    precision: str
    choice: str
    device: str = "cuda"
    ranks: int = 1
    drawn: bool = False

    @property
    def autocast(self) -> AbstractContextManager[object]:
        """Mixed precision for training; inference runs a model that is itself in bfloat16."""
        mixed = self.precision == "half" and self.mode == "training"
        return torch.autocast(self.device, dtype=torch.bfloat16) if mixed else nullcontext()

    def prepare(self, build: Callable[[], M]) -> M:
        """The model on its device, in the mode and the precision of its weights."""
        with torch.device(self.device):
            model = build()
        if self.mode == "inference":
            model = model.eval()
            return model.to(torch.bfloat16) if self.precision == "half" else model
        return model.train()

    def shared(self, model: nn.Module) -> nn.Module:
        """The model as every rank trains it."""
        return DistributedDataParallel(model) if self.ranks > 1 else model

    @property
    def input_dtype(self) -> torch.dtype:
        """Floating-point inputs are of the weights' type."""
        return torch.bfloat16 if self.precision == "half" and self.mode == "inference" else torch.float32

    def on_device(self, inputs: Inputs, batch_size: int, seq_len: int) -> tuple[torch.Tensor, ...]:
        """Inputs of this size, made on the device."""
        with torch.device(self.device):
            made = inputs(batch_size, seq_len)
        return tuple(map(_draw_input, made)) if self.drawn else made

    def synchronise(self) -> None:
        """Waits for the device; a CPU has nothing to wait for."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def _draw_input(tensor: torch.Tensor) -> torch.Tensor:
    """An input with values of its own: pixels, or token ids that every vocabulary has. Classes of samples, of which
    there may be two only, stay as they are."""
    if tensor.dtype.is_floating_point:
        return tensor.normal_()
    return tensor.random_(_LEAST_VOCABULARY) if tensor.dim() > 1 else tensor


def make_modern_step(
    setting: Setting, build: Callable[[], nn.Module], inputs: Inputs, loss: Loss, labels: Inputs
) -> MakeStep:
    """Today's loop: gradients dropped, not zeroed; PyTorch's default (foreach) optimizer; inputs on the GPU."""

    def make(batch_size: int, seq_len: int) -> Step:
        model = setting.shared(setting.prepare(build))
        batch, targets = setting.on_device(inputs, batch_size, seq_len), setting.on_device(labels, batch_size, seq_len)
        if setting.mode == "inference":
            return _make_inference_step(model, batch)
        optimizer = OPTIMIZERS[setting.optimizer](model.parameters(), lr=LEARNING_RATE)

        def step() -> None:
            optimizer.zero_grad()
            with setting.autocast:
                value = loss(model(*batch), *targets)
            value.backward()
            optimizer.step()

        return step

    return make


def make_cnn_study_step(setting: Setting, build: Callable[[], nn.Module], inputs: Inputs, labels: Inputs) -> MakeStep:
    """The loop of convnet-benchmark-py: synchronised after forward, backward and update, gradients zeroed last."""

    def make(batch_size: int, seq_len: int) -> Step:
        model = setting.shared(setting.prepare(build))
        batch = setting.on_device(inputs, batch_size, seq_len)
        (targets,) = setting.on_device(labels, batch_size, seq_len)
        if setting.mode == "inference":
            return _make_inference_step(model, batch)
        optimizer = OPTIMIZERS[setting.optimizer](model.parameters(), lr=LEARNING_RATE, foreach=False)
        criterion = nn.CrossEntropyLoss()

        def step() -> None:
            with setting.autocast:
                output = model(*batch)
            setting.synchronise()
            with setting.autocast:
                loss = criterion(output, targets)
            loss.backward()
            setting.synchronise()
            optimizer.step()
            setting.synchronise()
            optimizer.zero_grad(set_to_none=False)

        return step

    return make


def _make_inference_step(model: nn.Module, batch: Sequence[torch.Tensor]) -> Step:
    def step() -> None:
        with torch.no_grad():
            model(*batch)

    return step


def make_recommender_step(
    setting: Setting, build: Callable[[str], Recommender], inputs: Inputs, labels: Inputs
) -> MakeStep:
    """As `modern_step`, for a model whose fused tables update themselves: the optimizer steps what is left."""

    def make(batch_size: int, seq_len: int) -> Step:
        model = setting.prepare(lambda: build(setting.optimizer or "adam"))
        batch, (target,) = inputs(batch_size, seq_len), labels(batch_size, seq_len)
        if setting.mode == "inference":
            return _make_inference_step(model, batch)
        optimizer = OPTIMIZERS[setting.optimizer](model.dense_parameters(), lr=LEARNING_RATE)

        def step() -> None:
            optimizer.zero_grad()
            with setting.autocast:
                loss = compute_click_or_next_loss(model(*batch), target)
            loss.backward()
            optimizer.step()

        return step

    return make


def compute_click_or_next_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy: of a click where targets are numbers, of the next item where they are classes."""
    if target.dtype.is_floating_point:
        return nn.functional.binary_cross_entropy_with_logits(logits, target)
    return nn.functional.cross_entropy(logits, target)


@dataclass(frozen=True, slots=True)
class HostBatch:
    """Inputs of a DLRM in pinned host memory; one index tensor, or one per table for `bag`."""

    dense: torch.Tensor
    indices: tuple[torch.Tensor, ...]
    offsets: torch.Tensor
    target: torch.Tensor

    def pinned(self) -> HostBatch:
        """The same in memory that a GPU copies from by itself."""
        indices = tuple(tensor.pin_memory() for tensor in self.indices)
        return HostBatch(self.dense.pin_memory(), indices, self.offsets.pin_memory(), self.target.pin_memory())


def make_host_batch(config: DlrmConfig, batch_size: int, dtype: torch.dtype) -> HostBatch:
    """A batch of zeros, for captures: they read no values."""
    index = torch.int32 if config.index_dtype == "int32" else torch.int64
    dense = torch.zeros(batch_size, config.bottom_mlp[0], dtype=dtype).pin_memory()
    target = torch.zeros(batch_size, 1).pin_memory()
    if config.embedding == "bag":
        indices = [torch.zeros(batch_size * n, dtype=index).pin_memory() for n in config.lookups_per_table]
        offsets = torch.zeros(config.num_tables, batch_size, dtype=index).pin_memory()
    else:
        indices = [torch.zeros(batch_size * config.lookups, dtype=index).pin_memory()]
        offsets = torch.zeros(batch_size * config.num_tables + 1, dtype=index).pin_memory()
    return HostBatch(dense, tuple(indices), offsets, target)


def draw_host_batch(config: DlrmConfig, batch_size: int, dtype: torch.dtype, seed: int = 0) -> HostBatch:
    """A batch whose indices are drawn from each table's access distribution, for steps of `bag` tables that are run."""
    if config.embedding != "bag":
        raise TraincastError(f"tables of the kind '{config.embedding}' run on no CPU; give `embedding='bag'`")
    random = np.random.default_rng(seed)
    index = torch.int32 if config.index_dtype == "int32" else torch.int64
    accesses = [parse_access(text) for text in config.access] or [Uniform()] * config.num_tables
    indices, offsets = [], []
    for rows, lookups, access in zip(config.table_rows, config.lookups_per_table, accesses, strict=True):
        indices.append(torch.from_numpy(draw_rows(access, rows, batch_size * lookups, random)).to(index))
        offsets.append(torch.arange(0, batch_size * lookups, lookups, dtype=index))
    dense = torch.from_numpy(random.random((batch_size, config.bottom_mlp[0]), dtype=np.float32)).to(dtype)
    return HostBatch(dense, tuple(indices), torch.stack(offsets), torch.zeros(batch_size, 1))


def make_dlrm_step(setting: Setting, build: Callable[[DlrmConfig], Dlrm], config: DlrmConfig) -> MakeStep:
    """The loop of facebookresearch/dlrm: inputs copied inside the step, loss read back, gradients zeroed in place."""
    device = torch.device(setting.device)

    def make(batch_size: int, _: int) -> Step:
        model = setting.prepare(lambda: build(config))
        make_batch = draw_host_batch if setting.drawn or setting.device == "cpu" else make_host_batch
        host = make_batch(config, batch_size, setting.input_dtype)
        if setting.drawn and setting.device == "cuda":
            host = host.pinned()

        def forward() -> Any:
            indices = [tensor.to(device) for tensor in host.indices]
            offsets = host.offsets.to(device)
            return model(host.dense.to(device), indices if config.embedding == "bag" else indices[0], offsets)

        if setting.mode == "inference":
            return torch.no_grad()(forward)
        optimizer = OPTIMIZERS[setting.optimizer](model.dense_parameters(), lr=LEARNING_RATE, foreach=False)
        criterion = nn.MSELoss() if config.loss == "mse" else nn.BCELoss()

        def step() -> None:
            torch.ones(host.target.shape)  # sample weights the original makes and does not use
            with setting.autocast:
                probabilities = forward()
            if setting.precision == "half":
                probabilities = probabilities.float()
            loss = criterion(probabilities, host.target.to(device))
            loss.detach().cpu()
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()

        return step

    return make


def make_dlrm_v2_step(setting: Setting, build: Callable[[DcnConfig], DlrmDcn], config: DcnConfig) -> MakeStep:
    """Today's loop for a recommender: inputs copied without blocking, logits, foreach optimizer."""
    device = torch.device(setting.device)

    def make(batch_size: int, _: int) -> Step:
        model = setting.prepare(lambda: build(config))
        host = make_host_batch(config, batch_size, setting.input_dtype)

        def forward() -> Any:
            sent = (host.dense, *host.indices, host.offsets)
            return model(*(tensor.to(device, non_blocking=True) for tensor in sent))

        if setting.mode == "inference":
            return torch.no_grad()(forward)
        optimizer = OPTIMIZERS[setting.optimizer](model.dense_parameters(), lr=LEARNING_RATE)

        def step() -> None:
            optimizer.zero_grad()
            with setting.autocast:
                logits = forward()
                target = host.target.to(device, non_blocking=True)
                loss = nn.functional.binary_cross_entropy_with_logits(logits, target)
            loss.backward()
            optimizer.step()

        return step

    return make
