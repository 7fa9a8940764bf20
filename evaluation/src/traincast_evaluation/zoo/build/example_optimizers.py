"""Optimizers of NVIDIA's examples that PyTorch does not have, as the kernels that they launch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class _Masters:
    """Parameters, fp32 copies where they are half, and two moments."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, mixed: bool) -> None:
        self.parameters: list[torch.Tensor] = list(parameters)
        self.mixed = mixed
        self.masters = [p.detach().float() if mixed else p.detach() for p in self.parameters]
        self.first = [torch.zeros_like(p) for p in self.masters]
        self.second = [torch.zeros_like(p) for p in self.masters]
        self.steps = [torch.zeros((), device="cuda") for _ in self.masters]

    def unscale(self) -> list[torch.Tensor]:
        """Gradients as the update takes them; of half ones fp32 copies, whose overflow the host reads (Apex O2)."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if not self.mixed:
            return gradients
        wide = [torch.empty_like(gradient, dtype=torch.float32) for gradient in gradients]
        torch._foreach_copy_(wide, gradients)
        torch.zeros((), device="cuda").item()
        return wide

    def _clip_one_by_one(self, gradients: list[torch.Tensor]) -> None:
        """`clip_grad_norm_` of PyTorch before 2.0: a norm and a product for every gradient."""
        norm = torch.stack([torch.norm(gradient, 2.0) for gradient in gradients]).norm(2.0)
        share = torch.clamp(0.25 / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(share)

    def _write_back_parameters(self) -> None:
        """Parameters are copied from their fp32 copies, gradients are dropped."""
        if self.mixed:
            torch._foreach_copy_(self.parameters, self.masters)
        for parameter in self.parameters:
            parameter.grad = None


class FusedLamb(_Masters):
    """LAMB as multi-tensor kernels: norms of gradients, moments, norms of weights and updates, the update."""

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


class JitLamb(_Masters):
    """LAMB parameter by parameter; what a compiler fused is written as the fewest kernels PyTorch has for it."""

    @torch.no_grad()
    def step(self) -> None:
        """One update."""
        with torch.autograd.profiler.record_function("Optimizer.step#JITLamb.step"):
            gradients = [p.grad.float() if self.mixed else p.grad for p in self.parameters if p.grad is not None]
            torch.stack(torch._foreach_norm(gradients)).norm()
            torch._foreach_mul_(gradients, 0.5)
            self._update(gradients)

    def _update(self, gradients: list[torch.Tensor]) -> None:
        for weight, gradient, first, second in zip(self.masters, gradients, self.first, self.second, strict=True):
            first.lerp_(gradient, 0.1)  # the three moments are one kernel when compiled, which moves as much
            change = torch.addcdiv(second, first, gradient)
            ratio = weight.norm() / change.norm()
            weight.addcmul_(change, ratio, value=-0.01)
        self._write_back_parameters()


class FusedAdam(_Masters):
    """Adam as multi-tensor kernels, gradients clipped by their norm first (Apex)."""

    @torch.no_grad()
    def step(self, gradients: list[torch.Tensor]) -> None:
        """One update with what `unscale` gave."""
        with torch.autograd.profiler.record_function("Optimizer.step#FusedAdam.step"):
            torch._foreach_norm(gradients)
            torch._foreach_mul_(gradients, 0.5)
            used = [number for number, p in enumerate(self.parameters) if p.grad is not None]
            masters, first, second, steps = (
                [every[number] for number in used] for every in (self.masters, self.first, self.second, self.steps)
            )
            torch._fused_adamw_(
                masters, gradients, first, second, [], steps, lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.01,
                eps=1e-6, amsgrad=False, maximize=False,
            )  # fmt: skip
            self._write_back_parameters()


class BertAdam(_Masters):
    """Adam op by op, every gradient clipped by its own norm."""

    @torch.no_grad()
    def step(self, gradients: list[torch.Tensor]) -> None:
        """One update with what `unscale` gave."""
        with torch.autograd.profiler.record_function("Optimizer.step#BertAdam.step"):
            torch._foreach_norm(gradients)
            torch._foreach_mul_(gradients, 0.5)
            for parameter, first, second in zip(self.parameters, self.first, self.second, strict=True):
                if parameter.grad is None:
                    continue
                norm = torch.stack([torch.norm(parameter.grad, 2.0)]).norm(2.0)
                parameter.grad.mul_(torch.clamp(1.0 / (norm + 1e-6), max=1.0))
                first.mul_(0.9).add_(parameter.grad, alpha=0.1)
                second.mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
                change = first / (second.sqrt() + 1e-6)
                if parameter.dim() > 1:
                    change += 0.01 * parameter.detach()
                parameter.detach().add_(-(1e-5 * change))
                parameter.grad.zero_()
            self._write_back_parameters()


class AdamByParameter(_Masters):
    """PyTorch's Adam before 2.0, op by op for every parameter; gradients are clipped by their norm first."""

    @torch.no_grad()
    def step(self, gradients: list[torch.Tensor]) -> None:
        """One update with what `unscale` gave."""
        with torch.autograd.profiler.record_function("Optimizer.step#Adam.step"):
            self._clip_one_by_one(gradients)
            for weight, gradient, first, second in zip(self.masters, gradients, self.first, self.second, strict=True):
                first.mul_(0.9).add_(gradient, alpha=0.1)
                second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
                weight.addcdiv_(first, (second.sqrt() / 0.9).add_(1e-8), value=-1e-3)
            self._write_back_parameters()


class ClippedJitLamb(JitLamb):
    """`JitLamb` whose gradients are clipped one by one."""

    @torch.no_grad()
    def step(self, gradients: list[torch.Tensor]) -> None:  # type: ignore[override]
        """One update with what `unscale` gave."""
        with torch.autograd.profiler.record_function("Optimizer.step#JITLamb.step"):
            self._clip_one_by_one(gradients)
            self._update(gradients)


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
