"""The Python API: the same answers as the command line, in three lines. Everything is imported when it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

if TYPE_CHECKING:
    import polars as pl

    from traincast.host.profile import HostProfile
    from traincast.platform.platform import Platform
    from traincast.prediction.result import Prediction
    from traincast.prediction.scaling import ScalingCurve
    from traincast.questions.variant import VariantOptions
    from traincast.walk.uneven import Unevenness
    from traincast.workload.workload import Workload


def load(workload: str | Path, **variant: Unpack[VariantOptions]) -> Workload:
    """A built-in model by name, a saved workload (`.tc`), or a DLRM described in YAML, in a variant (see `predict`)."""
    from traincast.questions.variant import variant_of
    from traincast.questions.workloads import load as load_variant

    return load_variant(workload, variant_of(variant))


def predict(
    workload: str | Path | Workload,
    *,
    on: str | Platform,
    gpus: int | None = None,
    clock_mhz: float | None = None,
    host: str | HostProfile | None = None,
    roofline_only: bool = False,
    uneven: Unevenness | None = None,
    **variant: Unpack[VariantOptions],
) -> Prediction:
    """Predicts one step of a workload on a platform; see `Prediction` for what comes back (seconds).

    Keywords of the variant are the fields of `traincast.questions.variant.Variant`: `batch_size` (samples per GPU),
    `seq_len` (tokens per sample), `dtype`, `mode`, `optimizer`, `attention`, `embedding`, `compiled`. `gpus` is
    the number of GPUs (default 1, or as many as the workload was captured on); `uneven` lets ranks differ by chance.
    """
    from traincast.questions.predict import Question
    from traincast.questions.predict import predict as answer
    from traincast.questions.variant import variant_of

    return answer(
        Question(
            workload=workload,
            on=on,
            variant=variant_of(variant),
            gpus=gpus,
            clock_mhz=clock_mhz,
            host=host,
            roofline_only=roofline_only,
            uneven=uneven,
        )
    )


def scaling(
    workload: str | Path | Workload,
    *,
    on: str | Platform,
    gpus: Sequence[int],
    kind: str = "weak",
    clock_mhz: float | None = None,
    host: str | HostProfile | None = None,
    **variant: Unpack[VariantOptions],
) -> ScalingCurve:
    """Predicts one step on every number of GPUs given. `batch_size` is that of one GPU for a curve of the `kind`
    "weak", and that of all GPUs together for a "strong" one. Other keywords as in `predict`."""
    from traincast.questions.predict import Question
    from traincast.questions.scaling import predict_scaling
    from traincast.questions.variant import variant_of

    question = Question(workload=workload, on=on, variant=variant_of(variant), clock_mhz=clock_mhz, host=host)
    return predict_scaling(question, gpus, kind)


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
    from traincast.replay.analysis import TraceQuestion, analyse_traces
    from traincast.report.frames import trace_frames

    platform = load_platform(on) if isinstance(on, str) else on
    question = TraceQuestion(platform=platform, host=host, host_scale=host_scale, twice=twice)
    return trace_frames(analyse_traces(files, question))


def load_trace(*files: str | Path, step: int | None = None) -> Workload:
    """One step (by number; default: the one of median length) of a traced run as a workload, which can be saved with
    `traincast.workload.save_workload` and predicted elsewhere. Its `meta` says what the trace did not tell."""
    from traincast.replay.analysis import analyse_traces
    from traincast.replay.workload import trace_workload

    name = Path(files[0]).name.partition(".")[0] if files else ""
    return trace_workload(analyse_traces(files), name=name, step=step)
