"""What a top-level op's name says: which autograd node it is in any version of PyTorch, and what code issued it."""

from __future__ import annotations

import re

# nodes before PyTorch 1.9, which began to number them
_UNNUMBERED = re.compile(r"([A-Z]\w*Backward)$")
_PYTHON_NODES = ("All", "Lookup")  # autograd functions written in Python keep their class's name
_REPLACED = {
    "CudnnConvolutionBackward0": "ConvolutionBackward0",
    "CudnnConvolutionTransposeBackward0": "ConvolutionBackward0",
    "MiopenConvolutionBackward0": "ConvolutionBackward0",
    "ThnnConv2DBackward0": "ConvolutionBackward0",
    "ReluBackward1": "ReluBackward0",
    # what a capture calls attention before a device has chosen its kernel
    "ScaledDotProductFusedAttentionOverrideableBackward0": "ScaledDotProductFlashAttentionBackward0",
}


def get_current_name(op: str) -> str:
    """The name that a top-level op of an older trace has in host profiles."""
    numbered = f"{op}0" if _UNNUMBERED.match(op) and not op.startswith(_PYTHON_NODES) else op
    return _REPLACED.get(numbered, numbered)


# who issues a top-level op: the user's Python, the autograd engine taking up a node, or C++ in between (the engine's
# own sums, the reducer's copies)
PYTHON, NODE, ENGINE = ISSUERS = ("python", "node", "engine")
_NODE_MARKS = ("Backward", "AccumulateGrad", "torch::autograd::CppNode")


def get_issuer(op: str, *, main: bool) -> str:
    """One of `ISSUERS`; `main` says that the op runs on the main thread."""
    if main:
        return PYTHON
    return NODE if any(mark in op for mark in _NODE_MARKS) else ENGINE
