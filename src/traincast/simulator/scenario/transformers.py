"""Transformers by description as workloads of one GPU, written when they are asked for."""

from __future__ import annotations

from traincast.ir.workload import MAX_BATCH, MAX_SEQ_LEN, Workload
from traincast.models.transformers.description import Transformer
from traincast.models.transformers.program.step import inference_workload
from traincast.models.transformers.reading import load_transformer
from traincast.simulator.parallelism.groups import style_of
from traincast.simulator.parallelism.layout import Layout, completed
from traincast.simulator.parallelism.program import parallel_workload
from traincast.simulator.scenario.variant import Variant
from traincast.utils.errors import TraincastError

_OPTIMIZERS = (None, "adam", "none")


def described_step(source: str | Transformer, variant: Variant) -> Workload:
    """One step of a described Transformer (by name, in a file, or itself) in a variant."""
    model = load_transformer(source) if isinstance(source, str) else source
    if variant.optimizer not in _OPTIMIZERS:
        raise TraincastError(
            f"{model.name} is written with adam; give `optimizer` adam or none, not {variant.optimizer}"
        )
    if variant.embedding is not None:
        raise TraincastError(f"{model.name} has no embedding variants; leave out embedding '{variant.embedding}'")
    batch = 1 if variant.batch_size is None else variant.batch_size
    seq_len = model.seq_len if variant.seq_len is None else variant.seq_len
    for what, value, most in (("batch size", batch, MAX_BATCH), ("sequence length", seq_len, MAX_SEQ_LEN)):
        if not 1 <= value <= most:
            raise TraincastError(f"{what} {value} is out of range; give a whole number from 1 to {most}")
    layout = Layout(
        gpus=1,
        micro_batch=batch,
        global_batch=batch,
        seq_len=seq_len,
        precision=variant.dtype,
        attention="unfused" if variant.attention == "eager" else "flash",
        kernels="compiled" if variant.compiled else "eager",
        optimizer=variant.optimizer or "adam",
    )
    if variant.mode == "inference":
        return inference_workload(model, batch_size=batch, seq_len=seq_len, style=style_of(layout))
    return parallel_workload(model, completed(layout, model), (), gpus_per_node=1, micro_batches=1)
