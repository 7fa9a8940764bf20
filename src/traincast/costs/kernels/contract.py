"""Kernel calls, the contract of the models that give their seconds, the record of a family, and what every roofline is
made of.

Shares of peak are what good kernels achieve, taken from the V100 (1297 MHz) kernels of two DLRM training traces unless
said otherwise; they are not tuned per device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from traincast.hardware.device import TURING, VOLTA, Device
from traincast.utils.arrays import BoolArray, FloatArray, IndexArray, IntArray

COMPUTE_TYPES = (
    "fp32", "tf32", "fp16", "bf16", "fp8", "fp64", "int64", "int32", "int16", "int8", "bool", "fp8_block", "fp4",
)  # fmt: skip
"""What kernels compute in. fp8_block has a scale for every 128 elements, fp4 (NVFP4) one for every 16."""
# tf32 is stored as fp32; the scales of fp4 are bytes
COMPUTE_BYTES = dict(
    zip(COMPUTE_TYPES, (4.0, 4.0, 2.0, 2.0, 1.0, 8.0, 8.0, 4.0, 2.0, 1.0, 1.0, 1.0, 0.5625), strict=True)
)
_COMPUTE_CODE = {name: code for code, name in enumerate(COMPUTE_TYPES)}


@dataclass(frozen=True, slots=True)
class Family:
    """A kernel family: the kinds it knows and the numbers that describe a call, by name and order."""

    name: str
    kinds: tuple[str, ...]
    fields: tuple[str, ...]

    def call(self, kind: str, compute: str = "fp32", /, *, estimated: bool = False, **sizes: float) -> KernelCall:
        """A call of this family; every field must be given, and nothing else."""
        if kind not in self.kinds:
            raise AssertionError(f"kernel family {self.name} has no kind {kind!r}")
        if sizes.keys() != set(self.fields):
            raise AssertionError(f"a {self.name} call needs {', '.join(self.fields)}; got {', '.join(sizes)}")
        return KernelCall(self, kind, compute, tuple(float(sizes[field]) for field in self.fields), estimated)


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One kernel launch. `compute` is the type it computes in; `values` follow `family.fields`.

    `estimated` marks a call that stands in for an op nobody has modelled; `variant` are words that say which of the
    family's implementations runs where sizes do not tell (`costs.kernels.in_step` knows them).
    """

    family: Family
    kind: str
    compute: str
    values: tuple[float, ...]
    estimated: bool = False
    variant: str = ""


@dataclass(frozen=True, slots=True)
class Calls:
    """Many calls of one family as columns: `kind` and `compute` are codes, `values` is float64[n, fields]."""

    family: Family
    kind: IntArray
    compute: IntArray
    values: FloatArray

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, field: str) -> FloatArray:
        return self.values[:, self.family.fields.index(field)]

    def is_kind(self, *kinds: str) -> BoolArray:
        """Which calls are of one of these kinds."""
        wanted = np.zeros(len(self.family.kinds), dtype=np.bool_)
        wanted[[self.family.kinds.index(kind) for kind in kinds]] = True
        return np.asarray(wanted[self.kind])

    def is_compute(self, *compute: str) -> BoolArray:
        """Which calls compute in one of these types."""
        return np.isin(self.compute, [_COMPUTE_CODE[name] for name in compute])

    def per_compute(self, table: dict[str, float], default: float) -> FloatArray:
        """A value per call, looked up by its compute type."""
        lookup = np.array([table.get(name, default) for name in COMPUTE_TYPES])
        return lookup[self.compute]

    def item_bytes(self) -> FloatArray:
        """Bytes of one element of the compute type."""
        return self.per_compute({name: float(size) for name, size in COMPUTE_BYTES.items()}, 4.0)

    def only_compute(self) -> str:
        """The compute type that all calls share; calls of several are a mistake of the caller's."""
        (code,) = np.unique(self.compute)
        return COMPUTE_TYPES[code]

    def take(self, rows: IndexArray | BoolArray) -> Calls:
        """A selection of the calls."""
        return Calls(self.family, self.kind[rows], self.compute[rows], self.values[rows])

    def computing_in(self, compute: str) -> Calls:
        """The same calls in another compute type."""
        return Calls(self.family, self.kind, np.full_like(self.compute, _COMPUTE_CODE[compute]), self.values)

    @staticmethod
    def of(family: Family, calls: Iterable[KernelCall]) -> Calls:
        """Columns from single calls of one family."""
        calls = list(calls)
        return Calls.from_columns(
            family,
            [call.kind for call in calls],
            [call.compute for call in calls],
            np.array([call.values for call in calls], dtype=np.float64).reshape(len(calls), len(family.fields)),
        )

    @staticmethod
    def from_columns(family: Family, kind: Sequence[str], compute: Sequence[str], values: FloatArray) -> Calls:
        """Columns from names and a value matrix (n x fields)."""
        kinds = {name: code for code, name in enumerate(family.kinds)}
        return Calls(
            family,
            np.array([kinds[name] for name in kind], dtype=np.int64),
            np.array([_COMPUTE_CODE[name] for name in compute], dtype=np.int64),
            values,
        )


@dataclass(frozen=True, slots=True)
class Estimate:
    """Device times of calls: `seconds`, `sigma` (standard deviation of log time, so that a 90 % interval is
    seconds * exp(±1.645 sigma)) and `in_domain` (inside what the model was fitted on).

    How far outside: `factor` is how many times the size that is farthest outside is beyond the fitted ones (1 where
    all are inside, and for kinds and types that were not fitted at any size), `new_gpu` marks calls of a chip that was
    not measured. A model that tells neither leaves both out.
    """

    seconds: FloatArray
    sigma: FloatArray
    in_domain: BoolArray
    factor: FloatArray | None = None
    new_gpu: BoolArray | None = None

    @staticmethod
    def zeros(n: int) -> Estimate:
        """Of n calls, to be filled in: nothing takes time or is in domain."""
        outside = np.zeros(n, dtype=np.bool_)
        return Estimate(np.zeros(n), np.zeros(n), outside, np.ones(n), outside.copy())

    def columns(self) -> tuple[FloatArray, FloatArray, BoolArray, FloatArray, BoolArray]:
        """All columns in their order, those left out filled in."""
        factor = np.ones(len(self.seconds)) if self.factor is None else self.factor
        new_gpu = np.zeros(len(self.seconds), dtype=np.bool_) if self.new_gpu is None else self.new_gpu
        return self.seconds, self.sigma, self.in_domain, factor, new_gpu

    def take(self, rows: IndexArray | BoolArray) -> Estimate:
        """A selection of the calls."""
        seconds, sigma, in_domain, factor, new_gpu = self.columns()
        return Estimate(seconds[rows], sigma[rows], in_domain[rows], factor[rows], new_gpu[rows])

    def put(self, rows: IndexArray | BoolArray, part: Estimate) -> None:
        """Fills these rows of an estimate with all its columns."""
        for mine, other in zip(self.columns(), part.columns(), strict=True):
            mine[rows] = other


State = dict[str, npt.NDArray[Any]]
_SAME_CHIP = 0.025  # of the number of SMs (log): one more of T4's 40; GB200 has 152 where B200 has 148, and differs


class KernelModel(ABC):
    """Estimates the device time of one kernel family from a fitted state. Fitted attributes end in an underscore.

    How a state is fitted to measurements is no part of it: see the distribution `traincast-evaluation`.
    """

    family: ClassVar[Family]

    @abstractmethod
    def predict(self, calls: Calls, device: Device) -> Estimate:
        """Device time of every call, with spread and in-domain mask; vectorised."""

    @abstractmethod
    def state(self) -> State:
        """The fitted state as named arrays of numbers."""

    @classmethod
    @abstractmethod
    def from_state(cls, state: Mapping[str, npt.NDArray[Any]]) -> Self:
        """The model with this fitted state."""


class Parameters(Protocol):
    """What a model has learned, as a record that can be kept."""

    def state(self) -> State:
        """As named arrays of numbers."""

    @staticmethod
    def from_state(state: Mapping[str, npt.NDArray[Any]]) -> Any:
        """Read back from arrays."""


Learned = TypeVar("Learned", bound=Parameters)


class ParametricModel(KernelModel, Generic[Learned]):
    """A model whose fitted state is one record of `parameters`, kept as `parameters_`."""

    parameters: ClassVar[type[Parameters]]

    def __init__(self, parameters: Learned) -> None:
        self.parameters_ = parameters

    def state(self) -> State:
        """The fitted parameters."""
        return self.parameters_.state()

    @classmethod
    def from_state(cls, state: Mapping[str, npt.NDArray[Any]]) -> Self:
        """The model with these parameters."""
        return cls(cls.parameters.from_state(state))


@dataclass(frozen=True, slots=True)
class Chips:
    """The devices a model was fitted on, in the order of its per-device parameters."""

    keys: tuple[str, ...]
    archs: tuple[str, ...]
    numbers: FloatArray  # SMs, cores per SM, DRAM bytes per second

    @staticmethod
    def of(devices: Sequence[Device]) -> Chips:
        """The table of these devices."""
        return Chips(
            tuple(device.key for device in devices),
            tuple(device.arch for device in devices),
            np.array([[d.num_sms, d.cores_per_sm, d.dram_bandwidth] for d in devices], dtype=np.float64).reshape(-1, 3),
        )

    def find(self, device: Device) -> int:
        """Row of the device, or of the card with its chip and the nearest DRAM rate; -1 when there is none.

        A name alone says nothing: a user's file may be called like another chip. A few SMs more or less are the same
        chip.
        """
        sms = np.abs(np.log(self.numbers[:, 0] / device.num_sms))
        same = [
            row
            for row, arch in enumerate(self.archs)
            if arch == device.arch and sms[row] < _SAME_CHIP and self.numbers[row, 1] == device.cores_per_sm
        ]
        if not same:
            return -1
        nearest = [row for row in same if sms[row] == sms[same].min()]
        named = [row for row in nearest if self.keys[row] == device.key]
        if named:
            return named[0]
        distance = np.abs(np.log(self.numbers[nearest, 2] / device.dram_bandwidth))
        return nearest[int(np.argmin(distance))]

    def list_kin(self, device: Device) -> list[int]:
        """Rows of chips with SMs like this device's, which run the same kernels."""
        cores = self.numbers[:, 1]
        return [r for r, arch in enumerate(self.archs) if arch == device.arch and cores[r] == device.cores_per_sm]

    def restore_sms(self, device: Device, row: int) -> Device:
        """The device with as many SMs, and their rates, as the chip of this row (-1: as it is)."""
        if row < 0 or self.numbers[row, 0] == device.num_sms:
            return device
        sms = int(self.numbers[row, 0])
        peaks = {name: rate * sms / device.num_sms for name, rate in device.peak_flops.items()}
        return replace(device, num_sms=sms, peak_flops=peaks)

    def state(self) -> State:
        """The table as arrays."""
        return {
            "chip_key": np.array(self.keys, dtype=np.str_),
            "chip_arch": np.array(self.archs, dtype=np.str_),
            "chip_numbers": self.numbers,
        }

    @staticmethod
    def from_state(state: Mapping[str, npt.NDArray[Any]]) -> Chips:
        """The table read back."""
        return Chips(
            tuple(str(key) for key in state["chip_key"]),
            tuple(str(arch) for arch in state["chip_arch"]),
            np.asarray(state["chip_numbers"], dtype=np.float64),
        )


class ArrayRecord:
    """A dataclass of chips, arrays and numbers, kept as arrays of the same names."""

    __slots__ = ()

    def state(self) -> State:
        """As arrays."""
        arrays: State = {}
        for part in fields(cast("Any", self)):
            value = getattr(self, part.name)
            arrays |= value.state() if isinstance(value, Chips) else {part.name: np.atleast_1d(value)}
        return arrays

    @classmethod
    def from_state(cls, state: Mapping[str, npt.NDArray[Any]]) -> Self:
        """Read back from arrays."""
        read: dict[str, Callable[[str], Any]] = {
            "Chips": lambda name: Chips.from_state(state),
            "FloatArray": lambda name: np.asarray(state[name], dtype=np.float64),
            "float": lambda name: float(state[name][0]),
        }
        return cls(**{part.name: read[str(part.type)](part.name) for part in fields(cast("Any", cls))})


def load_state(path: Path) -> State:
    """Reads the numbers back from `path`.npz."""
    with np.load(path.with_suffix(".npz"), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


RooflineSeconds: TypeAlias = Callable[[Calls, Device, float], FloatArray]
"""Seconds of calls on a device where a kernel with nothing to do takes the seconds given last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRecord:
    """A kernel family and where its parts are, each imported when it is first needed.

    Parts are named within `package`: `lowering` are modules that register ops, all others are `module:name`; an empty
    module is `package` itself. A family without `model` is costed by its `roofline`, one without that elsewhere
    (collectives). `profile` names the file of its fitted state, which families may share.
    """

    family: Family
    package: str
    lowering: tuple[str, ...] = ("lowering",)
    roofline: str = ""
    roofline_sigma: float = 0.25  # log-sigma; assumed where a family has no figure of its own
    model: str = ""
    profile: str = ""

    def lowering_modules(self) -> tuple[str, ...]:
        """Dotted names of the modules that register this family's ops."""
        return tuple(self._module(module) for module in self.lowering)

    def roofline_seconds(self) -> RooflineSeconds:
        """The function that says what first principles allow."""
        function: RooflineSeconds = self._part(self.roofline)
        return function

    def model_class(self) -> type[KernelModel]:
        """The estimator of the family."""
        cls: type[KernelModel] = self._part(self.model)
        return cls

    def _module(self, name: str) -> str:
        return f"{self.package}.{name}" if name else self.package

    def _part(self, place: str) -> Any:
        module, name = place.split(":")
        return getattr(import_module(self._module(module)), name)


DRAM_SHARE = 0.88  # relu and its backward at 2048 x 1024
_L2_BYTES_PER_CLOCK = 21.0  # per SM
# share of peak inside a full wave, by (rows, columns) of the tile a block computes
_TILES = ((128, 128, 0.88), (128, 64, 0.86), (64, 64, 0.78), (128, 32, 0.76), (32, 32, 0.50))
WAITING_SHARE = 0.98
"""Of the rate with fp32 accumulation where matrix units multiply faster and wait for their own sums: OPT's layers on
RTX 3090 and 2080 Ti reach 69.8 of 71.2 and 53.4 of 53.8 TFLOPS (ops_forward_backward), A100, which does not, 0.80."""
PCIE_GBS = {3: 12.3, 4: 24.0, 5: 48.0}
HOST_LINK_SHARE = 0.75  # of a link other than PCIe (NVLink-C2C), as those are of the wire's; assumed
"""Gigabytes per second from or to pinned host memory by PCIe generation: 3 measured, others by the wire's rate."""
_NO_ECC_GAIN = 1.21  # 0.91 of the sheet's rate: Triton's softmax of 2048 x 4096 in fp32 on RTX 3090 (liger_ops)
# of what V100's streams reach: 0.74 of the sheet on P100 and 0.80 on TITAN Xp, where V100 has 0.91 (devices.csv); 0.75
# where check bits are on the bus
_HINDERED = 0.83
_TENSOR_CORES = ("tf32", "fp16", "bf16", "fp8")
_TENSOR_SHARE = 0.80  # of the tile's share: operands arrive late


def get_bus_gain(device: Device) -> float:
    """How much more of the sheet's DRAM rate streams reach than on the measured cards with GDDR, whose check bits take
    part of the bus: 0.91 against 0.75. Pascal's cards without them gain nothing (TITAN Xp: 0.80)."""
    free = device.is_capability_at_least(TURING) and not (device.made_for_computing or device.inline_ecc)
    return _NO_ECC_GAIN if free else 1.0


def get_dram_gain(device: Device) -> float:
    """What streams reach of the sheet's DRAM rate, over that of stacked memory since Volta: less on Pascal,
    and with GDDR whose check bits are on the bus."""
    stacked = device.made_for_computing and not device.is_capability_below(VOLTA)
    return 1.0 if stacked or get_bus_gain(device) > 1.0 else _HINDERED


def get_clock_hz(device: Device) -> float:
    """Cycles per second of an SM: the clock it is locked to, else boost."""
    return 1e6 * (device.clock_mhz or device.boost_clock_mhz)


def estimate_memory_seconds(nbytes: FloatArray, device: Device, share: float = DRAM_SHARE) -> FloatArray:
    """Time to move bytes once: at the L2's rate where they fit it, else at the DRAM's."""
    dram = share * device.dram_bandwidth
    l2 = max(_L2_BYTES_PER_CLOCK * device.num_sms * get_clock_hz(device), 1.25 * dram)
    kept = np.clip(2.0 - nbytes / (0.5 * device.l2_bytes), 0.0, 1.0)
    return np.asarray(kept * nbytes / l2 + (1.0 - kept) * nbytes / dram)


def get_pinned_rate(device: Device) -> float:
    """Bytes per second from or to pinned host memory, in one direction, while all that share the link copy."""
    pcie = 1e9 * PCIE_GBS.get(device.pcie_gen, PCIE_GBS[5 if device.pcie_gen > 5 else 3])
    return max(pcie, HOST_LINK_SHARE * device.host_link_bandwidth) / device.host_sharers


def get_flop_rate(calls: Calls, device: Device) -> FloatArray:
    """Flop/s a long kernel sustains, by compute type."""
    rates = {name: device.get_sustained_flops(name) for name in COMPUTE_TYPES}
    shares = {name: _TENSOR_SHARE if name in _TENSOR_CORES and name in device.peak_flops else 1.0 for name in rates}
    return calls.per_compute({name: rates[name] * shares[name] for name in rates}, device.get_sustained_flops("fp32"))


def estimate_gemm_arithmetic_seconds(
    batch: FloatArray, m: FloatArray, n: FloatArray, k: FloatArray, rate: FloatArray, device: Device
) -> FloatArray:
    """Arithmetic time of a GEMM: whole waves of tiles, the depth split where tiles are few; best tile."""
    best = np.full(np.shape(m), np.inf)
    for rows, cols, share in _TILES:
        tiles = batch * np.ceil(m / rows) * np.ceil(n / cols)
        splits = np.clip(np.floor(device.num_sms / tiles), 1.0, np.maximum(1.0, k // 128))
        waves = np.ceil(tiles * splits / device.num_sms)
        seconds = waves * 2.0 * rows * cols * (k / splits) * device.num_sms / (share * rate)
        best = np.minimum(best, seconds)
    return best
