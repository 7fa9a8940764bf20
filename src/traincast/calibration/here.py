"""The machine at hand, asked about by name: its store, its profile, and steps predicted on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traincast.calibration.measure import Source, make_runnable
from traincast.calibration.measure_ranks import capture_ranks
from traincast.costs.cpu.profile import HERE, Profile, get_profile_file, get_profile_home, load_machine, save_profile
from traincast.ir.workload import Workload
from traincast.models.dlrm.config import DlrmConfig
from traincast.simulator.cpu.predict import predict_on_machine
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.scenario.dlrm_file import read_dlrm
from traincast.simulator.scenario.scenario import Scenario
from traincast.simulator.scenario.workloads import load_single_gpu_step
from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import format_path
from traincast.utils.metrics import ErrorRow
from traincast.utils.results import Records, Result


def find_store_folder(device: str) -> Path:
    """The store of a device of this machine, unless another is named."""
    return get_profile_home() / f"store-{device}"


def capture_here(
    source: Source | Workload, variant: Scenario, runs_on: str = "cpu"
) -> tuple[Workload, tuple[str, ...]]:
    """A step as a device of this kind runs it, without running it, and which rows its tables' lookups want."""
    if isinstance(source, Workload) or str(source).endswith(".tc"):
        held = source if isinstance(source, Workload) else str(source)
        return load_single_gpu_step(variant.replace(workload=held)), ()
    from traincast.capturing.step import capture_step

    step = make_runnable(source, variant, device="cuda", drawn=False)
    build: Callable[..., Any] = step.build if step.seq_len else lambda batch: step.build(batch, 0)
    workload = capture_step(
        build, batch_size=step.batch_size, seq_len=step.seq_len or None, name=step.name,
        mode=variant.mode or "training", rebatch=False, runs_on=runs_on,
    )  # fmt: skip
    return workload, _read_access(source)


def _read_access(source: Any) -> tuple[str, ...]:
    if isinstance(source, DlrmConfig):
        return source.access
    name = str(source)
    return read_dlrm(Path(name)).access if name.endswith((".yaml", ".yml")) else ()


def predict_here(
    source: Source | Workload, variant: Scenario, on: str | Profile = HERE, gpus: int | None = None
) -> Prediction:
    """One step on a machine that was measured: of one process, or of as many ranks as `gpus`."""
    machine = load_machine(on)
    if isinstance(source, Workload) or str(source).endswith(".tc"):
        workload = load_single_gpu_step(
            variant.replace(workload=source if isinstance(source, Workload) else str(source))
        )
        if gpus is not None and gpus != len(workload.ranks):
            raise TraincastError(
                f"{workload.name} was captured on {len(workload.ranks)} ranks, not {gpus}; capture it again"
            )
        return predict_on_machine(workload, machine)
    if gpus is None or gpus == 1:
        workload, access = capture_here(source, variant)
        return predict_on_machine(workload, machine, (access,))
    together, accesses = capture_ranks(source, variant, gpus)
    return predict_on_machine(together, machine, accesses)


@dataclass(frozen=True, repr=False)
class Calibrated(Result):
    """A profile that was fitted from a store, and how wrong it is on what was held out."""

    file: Path
    profile: Profile
    errors: tuple[ErrorRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """The file, its machine and the errors."""
        return {
            "file": str(self.file),
            "device": dict(self.profile.identity),
            "clock": self.profile.clock,
            "samples": self.profile.samples,
            "reference_ms": 1e3 * self.profile.reference,
            "host_us": {name: 1e6 * seconds for name, seconds in self.profile.host.items()},
            "held_out": [dict(row) for row in self.profile.errors],
        }

    def headline(self) -> str:
        """What was written, and a line per family."""
        lines = [f"{self.file}: {self.profile.samples} samples of {self.profile.identity.get('name')}"]
        lines += ["held-out family        n    GMAE    MAPE   worst  in 90 %"]
        for row in self.errors:
            covered = "" if row.covered is None else f"{row.covered:5.0f} %"
            lines.append(f"{row.group:<20} {row.n:3d} {row.gmae:6.1f}% {row.mape:6.1f}% {row.worst:+6.0f}% {covered}")
        return "\n".join(lines)

    def records(self) -> Records:
        """Table "held_out": errors by family, percent."""
        return {"held_out": [dict(row) for row in self.profile.errors]}


def fit_store(folder: Path, out: Path | None, clock: str) -> Calibrated:
    """Fits the profile of a store and writes it."""
    from traincast.calibration.bench.store import Store
    from traincast.calibration.fit import fit_profile

    if not folder.is_dir():
        raise TraincastError(f"no store '{format_path(folder)}'; measure one with 'traincast bench'")
    store = Store(folder)
    if store.identity is None:
        raise TraincastError(f"store '{format_path(folder)}' is empty; measure with 'traincast bench'")
    if store.identity.device != "cpu":
        raise TraincastError(
            f"store '{format_path(folder)}' is of a GPU ({store.identity.name}), whose steps are predicted with a "
            "platform; give `refine` the built-in one that it is, or the file of one that describes it"
        )
    profile, errors = fit_profile(store.samples(), store.identity.to_dict(), clock)
    path = out or get_profile_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_profile(profile, path)
    return Calibrated(path, profile, tuple(errors))
