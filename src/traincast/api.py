"""The Python API: the same answers as the command line, in three lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from traincast.errors import TraincastError

if TYPE_CHECKING:
    import polars as pl

    from traincast.host.profile import HostProfile
    from traincast.platform.platform import Platform
    from traincast.prediction.prediction import Prediction
    from traincast.walk.uneven import Unevenness
    from traincast.workload.workload import Workload

DTYPES = ("fp32", "tf32", "fp16", "bf16")
OPTIMIZERS = ("none", "sgd", "adagrad", "adam")
MODES = ("training", "inference")
SCALINGS = ("weak", "strong")


def load(
    workload: str | Path,
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    dtype: str = "fp32",
    mode: str | None = None,
    optimizer: str | None = None,
    attention: str | None = None,
    embedding: str | None = None,
    compiled: bool = False,
) -> Workload:
    """A built-in model by name, a saved workload (`.tc`), or a DLRM described in YAML, at the size asked for; with
    `compiled` as `torch.compile` would run it (inference only)."""
    name = str(workload)
    if name.endswith(".tc"):
        found = _saved(Path(name), dtype=dtype, mode=mode, optimizer=optimizer)
    else:
        found = _described(name, dtype=dtype, mode=mode, optimizer=optimizer, attention=attention, embedding=embedding)
    return _at_size(found, batch_size, seq_len, compiled)


def load_on(
    workload: str | Path | Workload,
    platform: Platform,
    *,
    gpus: int | None = None,
    always_sharded: bool = False,
    batch_size: int | None = None,
    seq_len: int | None = None,
    dtype: str = "fp32",
    mode: str | None = None,
    optimizer: str | None = None,
    attention: str | None = None,
    embedding: str | None = None,
    compiled: bool = False,
) -> tuple[Workload, str]:
    """A workload as it runs on `gpus` GPUs of a platform, and what was assumed about that ("" for nothing).

    A DLRM trains hybrid parallel on several GPUs (with `always_sharded` also on one), every other workload of one GPU
    data parallel; one captured on several GPUs runs on those.
    """
    if isinstance(workload, str | Path):
        if mode != "inference" and not compiled and gpus is not None and (gpus > 1 or always_sharded):
            from traincast.programs.sharded.hybrid import described_dlrm, hybrid_variant

            config = described_dlrm(str(workload))
            if config is not None:
                return hybrid_variant(
                    config, gpus, platform, batch_size=batch_size, seq_len=seq_len, dtype=dtype, optimizer=optimizer,
                    attention=attention, embedding=embedding,
                )  # fmt: skip
        found = load(
            workload, batch_size=batch_size, seq_len=seq_len, dtype=dtype, mode=mode, optimizer=optimizer,
            attention=attention, embedding=embedding, compiled=compiled,
        )  # fmt: skip
    else:
        found = _at_size(workload, batch_size, seq_len, compiled)
    if gpus is None:
        return found, ""
    from traincast.programs.data_parallel import on_gpus

    return on_gpus(found, gpus), ""


def predict(
    workload: str | Path | Workload,
    *,
    on: str | Platform,
    batch_size: int | None = None,
    seq_len: int | None = None,
    gpus: int | None = None,
    dtype: str = "fp32",
    mode: str | None = None,
    optimizer: str | None = None,
    attention: str | None = None,
    embedding: str | None = None,
    compiled: bool = False,
    clock_mhz: float | None = None,
    host: str | HostProfile | None = None,
    roofline_only: bool = False,
    uneven: Unevenness | None = None,
) -> Prediction:
    """Predicts one step of a workload on a platform; see `Prediction` for what comes back (seconds).

    `batch_size` is that of one GPU; `gpus` (default 1, or as many as the workload was captured on) as in `load_on`.
    `uneven` lets ranks differ by chance.
    """
    from traincast.host.profile import load_host_profile
    from traincast.platform.links import with_links
    from traincast.platform.platform import load_platform
    from traincast.prediction.prediction import predict_step

    alone = load_platform(on) if isinstance(on, str) else on
    if clock_mhz is not None:
        alone = alone.at_clock(clock_mhz)
    platform, links = with_links(alone)
    step, shards = load_on(
        workload, platform, gpus=gpus, batch_size=batch_size, seq_len=seq_len, dtype=dtype, mode=mode,
        optimizer=optimizer, attention=attention, embedding=embedding, compiled=compiled,
    )  # fmt: skip
    profile = load_host_profile(host) if isinstance(host, str) else host
    many = len(step.ranks) > 1
    answer = predict_step(
        step,
        platform if many else alone,
        tf32=dtype == "tf32",
        host=profile,
        roofline_only=roofline_only,
        uneven=uneven,
    )
    assumed = tuple(said for said in (shards, links if many else "", step.meta.get("compiled")) if said)
    return replace(answer, warnings=(*answer.warnings, *assumed)) if assumed else answer


def read_trace(
    *files: str | Path,
    on: str | Platform | None = None,
    host: str | None = None,
    host_scale: float | None = 1.0,
    twice: tuple[str, ...] = (),
) -> dict[str, pl.DataFrame]:
    """What `traincast trace` measures, as data frames by name: "steps", "kernels", "overheads", "critical_path", ...;
    with a platform `on` also the "prediction". Needs polars."""
    from traincast.platform.platform import load_platform
    from traincast.replay.measured import TraceQuestion, analyse_traces
    from traincast.report.frames import trace_frames

    platform = load_platform(on) if isinstance(on, str) else on
    question = TraceQuestion(platform=platform, host=host, host_scale=host_scale, twice=twice)
    return trace_frames(analyse_traces(files, question))


def load_trace(*files: str | Path, step: int | None = None) -> Workload:
    """One step (by number; default: the one of median length) of a traced run as a workload, which can be saved with
    `traincast.workload.save_workload` and predicted elsewhere. Its `meta` says what the trace did not tell."""
    from traincast.replay.measured import analyse_traces
    from traincast.replay.traced_workload import trace_workload

    name = Path(files[0]).name.partition(".")[0] if files else ""
    return trace_workload(analyse_traces(files), name=name, step=step)


def _at_size(workload: Workload, batch_size: int | None, seq_len: int | None, compiled: bool) -> Workload:
    found = workload.resized(batch_size=batch_size, seq_len=seq_len)
    if not compiled:
        return found
    from traincast.kernels.fusion import compiled_step
    from traincast.prediction.prediction import lowering_context

    return compiled_step(found, lowering_context(found))


def _saved(path: Path, *, dtype: str, mode: str | None, optimizer: str | None) -> Workload:
    from traincast.workload.file import load_workload

    found = load_workload(path)
    if mode not in (None, found.mode):
        raise TraincastError(f"{path.name} holds a step of {found.mode}, not {mode}; capture it again for {mode}")
    if optimizer not in (None, "none"):
        raise TraincastError(f"{path.name} holds its own optimizer; only '--optimizer none' can change it")
    if dtype in ("fp16", "bf16"):
        raise TraincastError(f"{path.name} keeps the types it was captured with; capture it under autocast for {dtype}")
    return found


def _described(
    name: str, *, dtype: str, mode: str | None, optimizer: str | None, attention: str | None, embedding: str | None
) -> Workload:
    mode = mode or "training"
    if name.endswith((".yaml", ".yml")):
        from traincast.programs.dlrm.yaml_file import load_dlrm_yaml

        return load_dlrm_yaml(Path(name), mode=mode, optimizer=optimizer, precision=dtype, embedding=embedding)
    from traincast.zoo.catalog import load_model

    return load_model(name, mode=mode, optimizer=optimizer, precision=dtype, attention=attention, embedding=embedding)
