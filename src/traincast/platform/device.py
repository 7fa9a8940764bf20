"""A GPU as data: what its sheet says, what it sustains, and how a locked clock changes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from traincast.errors import TraincastError

# fp64 rate over the fp32 one where the sheet does not say (CUDA programming guide); half on chips made for fp64
_DOUBLE_SHARES = {"maxwell": 1 / 32, "pascal": 1 / 32, "turing": 1 / 32, "ampere": 1 / 64, "ada": 1 / 64}


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU (or one die of a package, as PyTorch sees it).

    Rates are per second, sizes in bytes. `peak_flops` is dense, by compute type ("fp32", "tf32", "fp16",
    "bf16", "fp8", "fp64"), at `boost_clock_mhz`; a type the chip lacks is absent.
    `sustained_clock_mhz` is what it holds
    under a long compute-bound load within its power limit; `kernel_gap` is the time in seconds between two kernels
    that wait in one stream's queue; `host` names the host profile of machines it is usual in, `node` the
    built-in node whose links join several of it ("": none is known); `clock_mhz` is the locked SM clock, or None when
    the clock floats.
    """

    key: str
    name: str
    vendor: str
    arch: str
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

    @property
    def effective_clock_mhz(self) -> float:
        """The SM clock a long kernel runs at: the locked one, else the sustained one."""
        return self.clock_mhz if self.clock_mhz is not None else self.sustained_clock_mhz

    def peak(self, compute: str) -> float:
        """Peak rate in flop/s of this compute type at boost clock (or at the locked clock).

        A type the chip has no units for runs at its fp32 rate.
        """
        return self._at_boost(compute) * (self.clock_mhz or self.boost_clock_mhz) / self.boost_clock_mhz

    def sustained(self, compute: str) -> float:
        """Rate in flop/s of this compute type at the clock that a long kernel runs at."""
        return self._at_boost(compute) * self.effective_clock_mhz / self.boost_clock_mhz

    def _at_boost(self, compute: str) -> float:
        if compute == "fp64" and compute not in self.peak_flops:
            made_for_it = self.arch not in _DOUBLE_SHARES or (self.arch != "turing" and self.cores_per_sm == 64)
            return self.peak_flops["fp32"] * (0.5 if made_for_it else _DOUBLE_SHARES[self.arch])
        return self.peak_flops.get(compute, self.peak_flops["fp32"])

    def at_clock(self, clock_mhz: float) -> Device:
        """This device with its SM clock locked."""
        ceiling = 1.1 * self.boost_clock_mhz
        if not 100 <= clock_mhz <= ceiling:
            raise TraincastError(
                f"SM clock {clock_mhz:g} MHz is out of range for {self.key}; give 100 to {ceiling:.0f} MHz"
            )
        return replace(self, clock_mhz=clock_mhz)
