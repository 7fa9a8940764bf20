"""Optimizers of NVIDIA's examples that PyTorch does not have, as the kernels that they launch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class _Lamb:
    """Parameters, fp32 copies where they are half, and two moments."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, mixed: bool) -> None:
        self.parameters: list[torch.Tensor] = list(parameters)
        self.mixed = mixed
        self.masters = [p.detach().float() if mixed else p.detach() for p in self.parameters]
        self.first = [torch.zeros_like(p) for p in self.masters]
        self.second = [torch.zeros_like(p) for p in self.masters]

    def _write_back_parameters(self) -> None:
        """Parameters are copied from their fp32 copies, gradients are dropped."""
        if self.mixed:
            torch._foreach_copy_(self.parameters, self.masters)
        for parameter in self.parameters:
            parameter.grad = None


class FusedLamb(_Lamb):
    """LAMB as multi-tensor kernels: norms of gradients, moments, norms of weights and updates, the update."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, mixed: bool) -> None:
        super().__init__(parameters, mixed=mixed)
        self.steps = [torch.zeros((), device="cuda") for _ in self.masters]

    @torch.no_grad()
    def step(self) -> None:
        """One update."""
        with torch.autograd.profiler.record_function("Optimizer.step#FusedLAMBAMP.step"):
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            torch._foreach_norm(gradients)
            wide = [g.float() for g in gradients] if self.mixed else gradients
            torch._fused_adamw_(
                self.masters, wide, self.first, self.second, [], self.steps, lr=1e-3, beta1=0.9, beta2=0.999,
                weight_decay=0.01, eps=1e-6, amsgrad=False, maximize=False,
            )  # fmt: skip
            torch._foreach_norm(self.masters)
            torch._foreach_norm(self.first)
            self._write_back_parameters()


class JitLamb(_Lamb):
    """LAMB parameter by parameter; what a compiler fused is written as the fewest kernels PyTorch has for it."""

    @torch.no_grad()
    def step(self) -> None:
        """One update."""
        with torch.autograd.profiler.record_function("Optimizer.step#JITLamb.step"):
            gradients = [p.grad.float() if self.mixed else p.grad for p in self.parameters if p.grad is not None]
            torch.stack(torch._foreach_norm(gradients)).norm()
            torch._foreach_mul_(gradients, 0.5)
            for weight, gradient, first, second in zip(self.masters, gradients, self.first, self.second, strict=True):
                first.lerp_(gradient, 0.1)  # the three moments are one kernel when compiled, which moves as much
                change = torch.addcdiv(second, first, gradient)
                ratio = weight.norm() / change.norm()
                weight.addcmul_(change, ratio, value=-0.01)
            self._write_back_parameters()


class FusedSgd(torch.optim.Optimizer):
    """SGD with momentum, one kernel a group; the detector's example gives every parameter a group of its own."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__([{"params": [parameter]} for parameter in parameters], {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            (parameter,) = group["params"]
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            torch._fused_sgd_(
                [parameter], [parameter.grad], [state["momentum"]], weight_decay=1e-4, momentum=0.9, lr=group["lr"],
                dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
            )  # fmt: skip
