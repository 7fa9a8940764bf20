"""A GPU as data: what its sheet says, what it sustains, and how a locked clock changes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from traincast.utils.errors import TraincastError

PASCAL, VOLTA, TURING, AMPERE, ADA, HOPPER, BLACKWELL = 6.0, 7.0, 7.5, 8.0, 8.9, 9.0, 10.0
"""Compute capabilities from which NVIDIA's chips, or the kernels written for them, changed."""
POWER_EXPONENT = 0.5
"""Clocks follow the power of a board to this: 0.58 and 0.63 for A100 (PCIe, 250 to 300 W, fp32 GEMMs) and MI300X to
MI325X (bf16), 0.3 to 1.1 for GB200 to GB300."""
SLACK = 1.15
"""How far a board that holds its boost clock in plain GEMMs is from its power limit: A100 holds it at 300 of 400 W."""
HOST = "host"
"""Among a device's corrections: what its host takes."""
CPU = "cpu"
"""The vendor and the architecture of a device that is one core of a measured CPU."""
_BLACKWELL_GRAPHICS = 12.0  # the Blackwell made for graphics has a number of its own


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU (or one die of a package, as PyTorch sees it).

    Rates are per second, sizes in bytes. `peak_flops` is dense, by compute type ("fp32", "tf32", "fp16",
    "bf16", "fp8", "fp4", "fp64"), at `boost_clock_mhz`; a type the chip lacks is absent.
    `sustained_clock_mhz` is what it holds
    under a long compute-bound load within its power limit; `kernel_gap` is the time in seconds between two kernels
    that wait in one stream's queue; `loaded_clock_mhz` is the clock that a step full of GEMMs leaves within
    the power limit (None: not known, see `with_sustained_clock`); `host` names the host profile of machines it is usual
    in, `node` the built-in node whose links join several of it ("": none is known); `clock_mhz` is the locked SM clock,
    or None when the clock floats; this many GPUs (`host_sharers`, this one included) copy over its link to the host at
    once. `corrections` are factors on the time of kernels by family, from measurements of one
    such GPU, and on that of its host ("host"). `power_limit_watts` is that of its board (None: not known).
    `compute_capability` is NVIDIA's number of the generation (9.0: Hopper), 0 for other vendors. `inline_ecc` says that
    check bits share the memory's bus with the data, as on data-centre cards with GDDR. `peak_flops` accumulates in
    fp32; `fp16_accumulation_flops` is the rate of fp16 that accumulates in fp16 (None: the same), as graphics cards are
    advertised: their units multiply faster than they add up.
    """

    key: str
    name: str
    vendor: str
    arch: str
    compute_capability: float
    memory_bytes: float
    dram_bandwidth: float
    num_sms: int
    cores_per_sm: int
    boost_clock_mhz: float
    sustained_clock_mhz: float
    peak_flops: Mapping[str, float]
    l2_bytes: float
    smem_per_sm_bytes: float
    nvlink_bandwidth: float
    pcie_gen: int
    source: str
    kernel_gap: float = 0.0
    host: str = "server-2022"
    node: str = ""
    clock_mhz: float | None = None
    loaded_clock_mhz: float | None = None
    corrections: Mapping[str, float] = field(default_factory=dict)
    host_sharers: int = 1
    power_limit_watts: float | None = None
    inline_ecc: bool = False
    fp16_accumulation_flops: float | None = None
    host_link_bandwidth: float = 0.0

    @property
    def is_cpu(self) -> bool:
        """Whether this is one core of a measured CPU (`cpu_device`): its kernels run on the host thread."""
        return self.vendor == CPU

    @property
    def host_slowness(self) -> float:
        """How many times as long as its host profile says the host of this GPU takes, as measured (else 1)."""
        return self.corrections.get(HOST, 1.0)

    @property
    def multiplying_gain(self) -> float:
        """How many times faster matrix units multiply than they accumulate in fp32; 1 where they keep up."""
        return self.fp16_accumulation_flops / self.peak_flops["fp16"] if self.fp16_accumulation_flops else 1.0

    @property
    def effective_clock_mhz(self) -> float:
        """The SM clock a long kernel runs at: the locked one, else the sustained one."""
        return self.clock_mhz if self.clock_mhz is not None else self.sustained_clock_mhz

    def get_peak_flops(self, compute: str) -> float:
        """Peak rate in flop/s of this compute type at boost clock (or at the locked clock).

        A type the chip has no units for runs at its fp32 rate.
        """
        return self._get_boost_flops(compute) * (self.clock_mhz or self.boost_clock_mhz) / self.boost_clock_mhz

    def get_product_flops(self, compute: str) -> float:
        """Peak rate in flop/s of matrix products of this type: matrix units that take fp32 (AMD's) included."""
        units = "fp32_matrix" if compute == "fp32" and "fp32_matrix" in self.peak_flops else compute
        return self.get_peak_flops(units)

    def get_sustained_flops(self, compute: str) -> float:
        """Rate in flop/s of this compute type at the clock that a long kernel runs at."""
        return self._get_boost_flops(compute) * self.effective_clock_mhz / self.boost_clock_mhz

    def _get_boost_flops(self, compute: str) -> float:
        if compute == "fp64" and compute not in self.peak_flops:
            # CUDA programming guide, throughput of native arithmetic instructions
            graphics = 1 / 64 if self.is_capability_at_least(AMPERE) else 1 / 32
            return self.peak_flops["fp32"] * (0.5 if self.made_for_computing else graphics)
        if compute == "int8" and compute not in self.peak_flops and self.is_capability_at_least(TURING):
            return 2 * self.peak_flops["fp16"]  # of NVIDIA's tensor cores, in all data sheets since Turing's
        stored = "fp8" if compute == "fp8_block" else compute  # scales change nothing about the units
        return self.peak_flops.get(stored, self.peak_flops["fp32"])

    def is_capability_at_least(self, capability: float) -> bool:
        """Whether this is an NVIDIA chip of that generation or a later one."""
        return self.vendor == "nvidia" and self.compute_capability >= capability

    def is_capability_below(self, capability: float) -> bool:
        """Whether this is an NVIDIA chip of an earlier generation."""
        return self.vendor == "nvidia" and self.compute_capability < capability

    @property
    def made_for_computing(self) -> bool:
        """Whether fp64 runs at half the rate of fp32 and the memory is HBM, not GDDR.

        NVIDIA's data-centre chips of the generations that have both kinds have 64 cores per SM, those made for
        graphics 128; every Turing is made for graphics.
        """
        if self.vendor != "nvidia" or self.compute_capability == VOLTA:
            return True
        if HOPPER <= self.compute_capability < _BLACKWELL_GRAPHICS:
            return True
        return self.compute_capability != TURING and self.cores_per_sm == 64

    @property
    def is_graphics_card(self) -> bool:
        """Whether this is a card for desktops and workstations: made for graphics, its memory without check bits."""
        return self.vendor == "nvidia" and not self.made_for_computing and not self.inline_ecc

    def with_sustained_clock(self) -> Device:
        """This device at the clock that hours of GEMMs leave it, where that is known.

        Kernels timed one by one with pauses run faster: their measurements are what a device is fitted to. A locked
        clock stays as it is.
        """
        if self.loaded_clock_mhz is None or self.clock_mhz is not None:
            return self
        return replace(self, sustained_clock_mhz=self.loaded_clock_mhz)

    def with_power_limit(self, watts: float) -> Device:
        """This device with its board limited to this power: clocks under load follow its square root, up to boost."""
        usual = self.power_limit_watts
        if usual is None:
            raise TraincastError(f"{self.key} has no 'power_limit_watts' in its data sheet; add it there")
        if not 0.3 * usual <= watts <= 2 * usual:
            raise TraincastError(
                f"power limit {watts:g} W is out of range for {self.key}; give {0.3 * usual:.0f} to {2 * usual:.0f} W"
            )
        gain = (watts / usual) ** POWER_EXPONENT
        slack = min(1.0, gain * SLACK) if self.sustained_clock_mhz >= self.boost_clock_mhz else gain
        loaded = self.loaded_clock_mhz
        return replace(
            self,
            power_limit_watts=watts,
            sustained_clock_mhz=min(self.boost_clock_mhz, self.sustained_clock_mhz * slack),
            loaded_clock_mhz=None if loaded is None else min(self.boost_clock_mhz, loaded * gain),
        )

    def with_clock(self, clock_mhz: float) -> Device:
        """This device with its SM clock locked."""
        ceiling = 1.1 * self.boost_clock_mhz
        if not 100 <= clock_mhz <= ceiling:
            raise TraincastError(
                f"SM clock {clock_mhz:g} MHz is out of range for {self.key}; give 100 to {ceiling:.0f} MHz"
            )
        return replace(self, clock_mhz=clock_mhz)


def cpu_device(key: str, name: str, *, memory_bytes: float, l2_bytes: float) -> Device:
    """One core of a CPU as a device; `memory_bytes` 0 is not known. It has no data sheet: its rates are 0, and what an
    op takes on it is what was measured."""
    return Device(
        key=key, name=name, vendor=CPU, arch=CPU, compute_capability=0.0, memory_bytes=memory_bytes or inf,
        dram_bandwidth=0.0, num_sms=1, cores_per_sm=1, boost_clock_mhz=1.0, sustained_clock_mhz=1.0,
        peak_flops={"fp32": 0.0}, l2_bytes=l2_bytes, smem_per_sm_bytes=0.0, nvlink_bandwidth=0.0, pcie_gen=0,
        source="measured with 'traincast bench'",
    )  # fmt: skip
