"""Set-ups of the corpus against real runs of them on this CPU: op by op, and the most memory held."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader

from tests.capturing.oracle import Node, differences, execution_trace, live_tensors, peak_bytes, profiled_peak
from tests.corpus.setups import Setup
from traincast.capturing import capture_step
from traincast.ir import Op, Workload
from traincast.ir.memory import list_memory_events
from traincast.ir.ops import StorageKind

_LOADER = "enumerate(DataLoader)"  # what it does is not recorded: it works in processes of its own


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """A real run with dropout as the one op that it is on CUDA, where a CPU draws, divides and multiplies; attention in
    its portable form; what `torch.compile` compiles as it is written; optimizers that go over all tensors at once."""
    library: Any = torch.library.Library("aten", "IMPL")

    def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        return torch.native_dropout(input, p, train)[0] if train and 0 < p < 1 else input

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that a kernel is overridden: it is meant to be
        library.impl("dropout", dropout, "CompositeImplicitAutograd", allow_override=True)
    optimizers: Any = [import_module(f"torch.optim.{name}") for name in ("optimizer", "swa_utils")]
    devices = optimizers[0]._get_foreach_kernels_supported_devices
    begin = DataLoader._get_iterator

    def begun(self: Any) -> Any:
        with torch.profiler.record_function(f"{_LOADER}.begin"):
            return begin(self)

    DataLoader._get_iterator = begun
    for module in optimizers:
        module._get_foreach_kernels_supported_devices = lambda: [*devices(), "cpu"]
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in optimizers:
            module._get_foreach_kernels_supported_devices = devices
        DataLoader._get_iterator = begin
        library._destroy()


def captured(setup: Setup) -> Workload:
    """The step with attention in its portable form."""
    with sdpa_kernel(SDPBackend.MATH):
        return capture_step(setup.build, batch_size=setup.batch, seq_len=setup.seq_len, name=setup.name, rebatch=False)


def real(setup: Setup) -> object:
    sizes = (setup.batch,) if setup.seq_len is None else (setup.batch, setup.seq_len)
    return setup.build(*sizes, device="cpu")


def op_differences(setup: Setup, folder: Path) -> list[str]:
    """Where the captured ops differ from PyTorch's execution trace of a real run; empty if nowhere."""
    with as_on_a_gpu():
        trace = execution_trace(real(setup), folder)
    return list_differences(trace, captured(setup))


def list_differences(trace: list[Node], workload: Workload) -> list[str]:
    """Where the ops of a captured step differ from those of a real one; what a data loader does is left out, and so are
    copies to a device and waits for it, which a CPU has not."""
    trace = [node for node in trace if not node.name.startswith(_LOADER)]
    left = [op for op in workload.programs[0].ops if not (_moves(op) or op.name.startswith("cuda::"))]
    found = list(differences(trace, left))
    return found + [f"{op.name} is too much" for op in left[:3]]


def _moves(op: Op) -> bool:
    """Whether an op only takes a host tensor to the device, for which a CPU does nothing."""
    if op.name != "aten::_to_copy":
        return False
    source, made = op.inputs[0].spec, op.outputs[0].spec
    return source.device != made.device and source.dtype == made.dtype


@dataclass(frozen=True)
class Peaks:
    """Bytes held at most: by the real run without scratch space inside ops, by the captured one on its device, and
    what that one keeps on the host, which a CPU counts too: optimizers' counters (`least`), other numbers (`most`)."""

    real: int
    captured: int
    least: int
    most: int

    @property
    def unexplained(self) -> int:
        """Bytes by which they differ beyond what is on the host."""
        more = self.real - self.captured
        return more - min(max(more, self.least), self.most)


def peaks(setup: Setup) -> Peaks:
    """What a real run and the captured step hold."""
    gc.collect()
    before = {id(t) for t in live_tensors()}
    with as_on_a_gpu():
        step = real(setup)
        step()
        for tensor in live_tensors():
            if tensor.is_leaf and tensor.grad is not None:
                tensor.grad = None  # those of the first run are no part of what is held
        gc.collect()
        held = [t for t in live_tensors() if id(t) not in before]
        peak = profiled_peak(step, held)
    program = captured(setup).programs[0]
    host = list_memory_events(program).host
    counters = 0 if host is None else int(host.nbytes[host.category == StorageKind.OPTIMIZER_STATE].sum())
    most = 0 if host is None else int(host.nbytes.sum())
    return Peaks(peak.peak_bytes - peak.scratch_bytes, peak_bytes(program), counters, most)
