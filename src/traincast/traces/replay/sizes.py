"""What a traced step is, told from its ops: samples and tokens, training or inference, and what of it has sizes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from traincast.ir.ops import Signature
from traincast.traces.link import Linked

_PRODUCTS = re.compile(r"aten::(?:addmm|mm)$")
_CONVOLUTIONS = re.compile(r"aten::(?:convolution|_convolution|cudnn_convolution|miopen_convolution|conv[123]d)$")
_ATTENTION = re.compile(
    r"scaled_dot_product|(?:flash|efficient|varlen|unified|paged)_attention|reshape_and_cache|rotary"
)
_LENGTH_FIRST = re.compile(r"aten::_(?:flash|efficient)_attention_forward$")  # samples, tokens, heads, width
_GRADIENT = re.compile(
    r"Backward\d*$|AccumulateGrad|CppNode|autograd::|Optimizer\.|backward|[_a-z]bwd|dgrad|wgrad|multi_tensor_apply"
)
_TOLD = 0.995  # share of kernel time with sizes from which nothing need be said


def infer_sizes(signatures: Iterable[Signature], linked: Linked) -> tuple[int, int, str]:
    """Samples of a step, tokens of a sample (0 where there are none), and what is to be said about them.

    Products have samples x tokens as rows. How they divide is told by attention (samples, heads, tokens, width), by
    lookups of a table of samples x tokens, or by the images of a convolution; where tokens are in one long row, as
    servers have them, it is not told, and the step counts as one sample.
    """
    rows, images, pairs = Counter[int](), Counter[int](), Counter[tuple[int, int]]()
    for signature in signatures:
        if not signature.inputs or not signature.inputs[-1 if signature.name == "aten::embedding" else 0].shape:
            continue
        shape = signature.inputs[0].shape
        if _PRODUCTS.match(signature.name):
            operand = signature.inputs[1] if signature.name == "aten::addmm" else signature.inputs[0]
            rows[operand.shape[0] if operand.shape else 0] += 1
        elif _CONVOLUTIONS.match(signature.name):
            images[shape[0]] += 1
        elif signature.name == "aten::embedding" and len(signature.inputs[-1].shape) == 2:
            pairs[signature.inputs[-1].shape[0], signature.inputs[-1].shape[1]] += 1
        elif _ATTENTION.search(signature.name) and len(shape) == 4:
            pairs[shape[0], shape[1] if _LENGTH_FIRST.match(signature.name) else shape[2]] += 1
    most = max(rows.most_common(1)[0][0], 1) if rows else 1
    for (samples, tokens), _ in pairs.most_common():
        if samples * tokens == most:
            return samples, tokens, ""
    if images:
        return max(images.most_common(1)[0][0], 1), 0, ""
    if any(_ATTENTION.search(name) for name in linked.trace.names):
        return 1, most, f"GEMMs have {most} rows: tokens, and the trace does not say of how many samples"
    return most, 0, ""


def infer_mode(linked: Linked) -> str:
    """ "training" where something of a gradient or an optimizer was recorded, else "inference"."""
    return "training" if any(_GRADIENT.search(name) for name in linked.trace.names) else "inference"


def describe_coverage(covered: float, total: float) -> str:
    """What of the kernel time (seconds) a workload has the sizes of, in a line of its own; "" where it has all."""
    share = covered / total if total else 1.0
    if share >= _TOLD:
        return ""
    return (
        f"{share:.0%} of the kernel time: the other {1 - share:.0%} ({1e3 * (total - covered):.3g} ms) has no shapes "
        "and counts as empty kernels, so a prediction is too short by about that; record with record_shapes=True"
    )
