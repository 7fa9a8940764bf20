"""Small programs that once came out wrong without a word (`../shared/capture_cases`): captured, predicted, and told."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import traincast
from traincast.app.report.prediction import format_prediction
from traincast.utils.errors import TraincastError

GPUS = ("a100-80gb", "h100", "rtx-2080-ti")


# What the answer must say of each case, or must refuse it with ("refused: ..."). Of cases that were wrong or failed and
# are right now nothing has to be said: their ms on an A100 are between two numbers.
CASES: dict[str, str | tuple[float, float]] = {
    "accumulation.py": "adds up gradients of 8 batches of 32 samples",
    "alternation.py": "a step is a cycle of 2 updates that differ",
    "bnb.py:make_adam8bit": "without a kernel model .*bitsandbytes::optimizer_update_8bit_blockwise",
    "bnb.py:make_linear4bit": "RTX 2080 Ti has no units for bf16",
    "capability.py:make_step": "is told NVIDIA A100.*capture it as another one",
    "checkpoint_overwritten.py": "not done, as a capture changes nothing: wrote model.pt.pt",
    "cpu_table.py:make_step": "run on the CPU and write 5120.0 MB there",
    "default_batch.py": "batch size 4096: the first dimension of what the model is given",
    "devices.py:make_two_gpus": "several GPUs in one process: recorded as one",
    "devices.py:make_numpy": "work of the host outside PyTorch.*`loader_ms`",
    "devices.py:make_sleep": "20. ms of the step are work of the host outside PyTorch",
    "devices.py:make_thread": (0.25, 0.4),
    "devices.py:make_cpu_embedding": "run on the CPU and write 5120.0 MB there",
    "devices.py:make_script": (0.3, 0.5),
    "devices.py:make_compile_reduce": "replays CUDA graphs, which this step is without",
    "devices.py:make_compile_autotune": "replays CUDA graphs, which this step is without",
    "devices.py:make_vmap": (0.4, 0.9),
    "devices.py:make_double_backward": (0.5, 1.2),
    "devices.py:make_nested": "sizes that differ from draw to draw",
    "devices.py:make_swa": (0.35, 0.8),
    "epoch_inside.py": "have an evaluation before them .*not in the step",
    **{
        f"exotic.py:make_{name}": f"without a kernel model .*{op}"
        for name, op in {
            "svd": "svd", "eigh": "eigh", "inv": "inv", "cholesky": "cholesky", "qr": "qr", "solve": "solve",
            "fft": "fft", "cdist": "cdist", "spmm": "sparse", "matrix_exp": "matrix_exp",
        }.items()
    },
    "exotic.py:make_sort": (4.0, 20.0),  # 1.2 GB three to eight times through 2 TB/s
    "exotic.py:make_topk": (2.0, 20.0),
    "exotic.py:make_cumsum": (0.4, 1.0),
    "exotic.py:make_ctc": (1.0, 10.0),
    "exotic.py:make_conv3d": "4, 64, 64, 64, 64.: 4 are counted",
    "exotic.py:make_grid": (2.0, 15.0),
    "exotic.py:make_csr": "refused: compressed sparse .CSR. matrix, which has no price here",
    "exotic.py:make_scatter": (1.3, 20.0),
    "exotic.py:make_unique": (0.3, 10.0),
    "exotic.py:make_fp64": (7.0, 12.0),  # 137 GFLOP at 19.5 TFLOPS
    "exotic.py:make_complex": (28.0, 35.0),  # 550 GFLOP at 19.5 TFLOPS
    "exotic.py:make_int8": (0.22, 0.5),  # 137 GOP at 624 TOPS
    "exotic.py:make_fp8": "A100.* has no units for fp8",
    "exotic.py:make_lstm": (40.0, 120.0),
    "exotic.py:make_multinomial": (0.3, 3.0),
    "exotic.py:make_einsum": (0.1, 0.5),
    "exotic.py:make_interp": (1.0, 10.0),
    "host_work.py:make_step": "work of the host outside PyTorch.*`loader_ms`",
    "int_of_item.py:make_step": "refused: int_of_item.py:15: int.tensor.item",
    "int_of_item.py:make_range": "refused: int_of_item.py:32: tensor.item.. as an index, a size or a count",
    "int_of_item.py:make_rows": "refused: int_of_item.py:48: int.tensor.item",
    "int_of_item.py:make_float": "refused: int_of_item.py:64: tensor.item.. as an index, a size or a count",
    "item_float_decides.py:make_step": "item_float_decides.py:14: a fraction read from a tensor decides as 0.0 would",
    "last_batch.py": "have fewer samples .22 instead of 64",
    "numpy_of_host_tensor.py": (0.2, 0.4),
    "other_peak.py:make_complex": (28.0, 35.0),
    "other_peak.py:make_int8": (0.22, 0.5),
    "other_peak.py:make_fp8": "A100.* has no units for fp8",
    "prefetch_thread.py:make_step": (0.25, 0.4),
    "sampler_process.py": (0.25, 0.45),
    "sizes.py:make_saturating": (0.3, 0.6),
    "sizes.py:make_chunks": (0.2, 0.4),
    "sizes.py:make_padded": (0.2, 0.4),
    "sizes.py:make_log": "usable at this size only .the step runs other ops at batch",
    "sizes.py:make_sqrt": "are those drawn at batch 32, and grow with it",
    "sizes.py:make_random_depth": "updates differ from one to the next",
    "sizes.py:make_random_depth_torch": "updates differ from one to the next",
    "sizes.py:make_random_length": "updates differ from one to the next",
    "swallowed.py:make_step": "refused: swallowed.py:15: aten::index needs the values",
    "tensor_of_tensors.py:make_step": (0.35, 0.7),
    "tp_output_replicate.py": (0.8, 3.0),
    "triton_kernel.py:make_step": "the Triton kernel double is an op triton_kernel::double",
    "two_gpus_one_process.py:make_step": "several GPUs in one process: recorded as one",
    **{
        f"unknown_int.py:make_{name}": f"refused: unknown_int.py:{line}: "
        for name, line in {
            "list_index": 21, "module_list": 26, "dict": 30, "bool": 34, "pow": 38, "shift": 42, "round": 46, "max": 54,
        }.items()
    },
    "unknown_int.py:make_divided": "a fraction read from a tensor decides as 0.0 would",
    "unknown_int.py:make_numpy_item": "numbers read from tensors as lists and arrays are taken to be 0",
    "unknown_int.py:make_tolist": "numbers read from tensors as lists and arrays are taken to be 0",
    "unknown_int.py:make_float": "a fraction read from a tensor is taken to be 0.0",
    "unknown_int.py:make_format": "numbers of tensors that are printed are taken to be 0",
    "unknown_int.py:make_clip": (1.0, 1.8),  # gradients are None when the norm is asked for, as in a real run
    "unknown_int.py:make_isnan_item": (1.0, 1.8),  # no number is broken: the nine layers run
    "wgan_ncritic.py": "a step is a cycle of 5 updates that differ",
    "wrapped_optimizer.py": (0.2, 0.5),
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {"tp_output_replicate.py": {"gpus": 4}}  # of `capture`


@dataclass
class Answer:
    """What came of one case: ms on each GPU, or the message that it was refused with, and all that was said."""

    milliseconds: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # by GPU; "capture": none was captured
    said: str = ""
    samples: float = 0.0


def list_cases(folder: Path) -> Iterator[str]:
    """Every case of a folder: FILE.py of a script, or FILE.py:FUNCTION for each function that makes a step."""
    for file in sorted(folder.glob("*.py")):
        functions = re.findall(r"^def (make_\w+)\(", file.read_text(encoding="utf-8"), re.MULTILINE)
        yield from (f"{file.name}:{function}" for function in functions) if functions else (file.name,)


def try_case(folder: Path, case: str) -> Answer:
    """Captures a case and predicts it on three GPUs."""
    answer = Answer()
    try:
        workload = traincast.capture(str(folder / case), time_limit_s=120.0, **OPTIONS.get(case, {}))
    except TraincastError as error:
        answer.refused["capture"] = str(error)
        return answer
    answer.samples = workload.samples / workload.updates
    said = [workload.contents(), *workload.assumptions]
    for gpu in GPUS:
        try:
            result = traincast.predict(workload, on=gpu if len(workload.ranks) == 1 else "dgx-a100")
        except TraincastError as error:
            answer.refused[gpu] = str(error)
            continue
        answer.milliseconds[gpu] = result.iteration * 1e3
        said.append(format_prediction(result))
    answer.said = "\n".join(said)
    return answer


def find_fault(case: str, answer: Answer) -> str:
    """What is wrong with an answer, and is not said; "" where nothing is."""
    expected = CASES[case]
    if isinstance(expected, tuple):
        low, high = expected
        found = answer.milliseconds.get(GPUS[0])
        return "" if found and low <= found <= high else f"{found} ms instead of {low} to {high}; {answer.refused}"
    refused = expected.removeprefix("refused: ")
    text = answer.said if refused == expected else " ".join(answer.refused.values())
    return "" if re.search(refused, text) else f"nothing is said of '{refused}'; {answer.refused or answer.said}"
