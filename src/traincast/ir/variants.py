"""Words that ops carry where their sizes do not tell which implementation runs, and host ops that stand for Python.

An op whose signature has the scalar `variant` runs that implementation of its kernels: one or more of these words,
separated by spaces. Costs that differ by implementation stand in `traincast.costs.in_step`.
"""

from __future__ import annotations

VARIANT = "variant"
"""The scalar of a signature."""

GROUPED = "grouped"
"""A GEMM per expert in one kernel, of an expert's own number of rows each."""
GROUPED_NARROW = "grouped_8bit"
"""Likewise in eight bits; the op itself is written in 16, in which alone batched GEMMs were measured."""
BATCHED = "batched"
"""Batched GEMMs of attention that is written out, by a vendor's library that was tuned for them."""
ROWWISE = "rowwise"
"""An 8-bit GEMM with a scale for every row."""
TUNED = "tuned"
"""A GEMM whose kernel a vendor or a submission chose for this size."""
TRITON, FLASH2 = "triton", "flash2"
"""Attention by Triton's first kernel, or by the second version of flash attention."""
RING = "ring"
"""Attention in parts whose results are merged in fp32 (PyTorch's context parallelism)."""
NARROW_LOADS = "narrow_loads"
"""An element-wise kernel that loads 16-bit values one by one."""
UNIFORM = "uniform"
"""A collective whose `group` stands for many that are formed like it: every rank that runs the program calls it in a
group of its own, and all ranks of that group run the same program."""
BETWEEN_STAGES = "stages"
"""A message from every rank that runs one program to its counterpart that runs another one; `source` and `target` are
the first of them."""
EXPOSED = "exposed"
"""A collective that nothing can run alongside: the kernels after it wait."""

DISPATCH_SCOPE = "moe::dispatch"
"""The host op that stands for the Python of one call in a mixture's token dispatcher, where token counts reach the host
and decide sizes."""
MODULE_SCOPE = "torch.nn.Module._call_impl"
"""The host op that stands for the Python of one module call in programs that are written from a description."""
TIMES = " x "
"""Between the name of a host op and how often it runs in a row."""
