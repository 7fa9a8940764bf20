"""The Python API: the same answers as the command line, in three lines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from traincast.errors import TraincastError

if TYPE_CHECKING:
    import polars as pl

    from traincast.platform.platform import Platform
    from traincast.simulate.prediction import Prediction
    from traincast.workload.workload import Workload

DTYPES = ("fp32", "tf32", "fp16", "bf16")
OPTIMIZERS = ("none", "sgd", "adagrad", "adam")
MODES = ("training", "inference")


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
) -> Workload:
    """A built-in model by name, a saved workload (`.tc`), or a DLRM described in YAML, at the size asked for."""
    name = str(workload)
    if name.endswith(".tc"):
        found = _saved(Path(name), dtype=dtype, mode=mode, optimizer=optimizer)
    else:
        found = _described(name, dtype=dtype, mode=mode, optimizer=optimizer, attention=attention, embedding=embedding)
    return found.resized(batch_size=batch_size, seq_len=seq_len)


def predict(
    workload: str | Path | Workload,
    *,
    on: str | Platform,
    batch_size: int | None = None,
    seq_len: int | None = None,
    gpus: int = 1,
    dtype: str = "fp32",
    mode: str | None = None,
    optimizer: str | None = None,
    attention: str | None = None,
    embedding: str | None = None,
    clock_mhz: float | None = None,
    host: str | None = None,
    roofline_only: bool = False,
) -> Prediction:
    """Predicts one step of a workload on a platform; see `Prediction` for what comes back (seconds)."""
    from traincast.host.profile import load_host_profile
    from traincast.platform.platform import load_platform
    from traincast.simulate.prediction import predict_step

    if gpus != 1:
        raise TraincastError(f"--gpus {gpus}: several GPUs are not predicted yet; leave --gpus out")
    platform = load_platform(on) if isinstance(on, str) else on
    if clock_mhz is not None:
        platform = platform.at_clock(clock_mhz)
    if isinstance(workload, str | Path):
        workload = load(
            workload,
            batch_size=batch_size,
            seq_len=seq_len,
            dtype=dtype,
            mode=mode,
            optimizer=optimizer,
            attention=attention,
            embedding=embedding,
        )
    else:
        workload = workload.resized(batch_size=batch_size, seq_len=seq_len)
    profile = load_host_profile(host) if host is not None else None
    return predict_step(workload, platform, tf32=dtype == "tf32", host=profile, roofline_only=roofline_only)


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
    from traincast.report.frames import trace_frames
    from traincast.simulate.measured import TraceQuestion, analyse_traces

    platform = load_platform(on) if isinstance(on, str) else on
    question = TraceQuestion(platform=platform, host=host, host_scale=host_scale, twice=twice)
    return trace_frames(analyse_traces(files, question))


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
        from traincast.models.dlrm_yaml import load_dlrm_yaml

        return load_dlrm_yaml(Path(name), mode=mode, optimizer=optimizer, precision=dtype, embedding=embedding)
    from traincast.models.catalog import load_model

    return load_model(name, mode=mode, optimizer=optimizer, precision=dtype, attention=attention, embedding=embedding)
