"""A workload: the programs of a training step and which ranks run them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from traincast.errors import TraincastError
from traincast.workload.program import Program

MAX_BATCH = 1 << 26
MAX_SEQ_LEN = 1 << 20
DEFAULT_FRAMEWORK = "2.13"
"""The PyTorch that steps follow unless they say another: the one that captures are tested with."""
STUDY_FRAMEWORK = "1.8"
"""The PyTorch of the published single-GPU studies, whose steps the built-in DLRMs and CNNs are."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Workload:
    """Programs and the rank → program map (`ranks[r]` is the program of rank r).

    `synchronised` says that every step starts and ends with an idle device (the loop synchronises);
    otherwise consecutive steps run into each other. `framework_version` is the PyTorch whose
    op-to-kernel choices the step follows (e.g. "2.13", "1.8"). `meta` is free text for people.
    """

    name: str
    programs: tuple[Program, ...]
    ranks: tuple[int, ...] = (0,)
    mode: str = "training"
    synchronised: bool = False
    framework_version: str = DEFAULT_FRAMEWORK
    meta: Mapping[str, str] = field(default_factory=dict)

    @property
    def batch_size(self) -> int:
        """Samples per rank and step."""
        return self.programs[0].batch_size

    @property
    def seq_len(self) -> int:
        """Tokens per sample; 0 for a model without sequences."""
        return self.programs[0].seq_len

    def resized(self, *, batch_size: int | None = None, seq_len: int | None = None) -> Workload:
        """The same workload at another batch size (per rank) or sequence length, without torch."""
        batch = self.batch_size if batch_size is None else batch_size
        seq = self.seq_len if seq_len is None else seq_len
        if (batch, seq) == (self.batch_size, self.seq_len):
            return self
        _check_range("batch size", batch, MAX_BATCH)
        if seq_len is not None:
            if not self.seq_len:
                raise TraincastError(f"workload '{self.name}' has no sequence length; leave out --seq-len")
            _check_range("sequence length", seq, MAX_SEQ_LEN)
        for program in self.programs:
            if program.rigid:
                raise TraincastError(
                    f"workload '{self.name}' cannot change its batch or sequence size: {program.rigid}"
                )
            if batch != self.batch_size and not program.sizes.depends_on_batch():
                raise TraincastError(f"workload '{self.name}' was captured at one batch size only ({self.batch_size})")
            if seq != self.seq_len and not program.sizes.depends_on_seq_len():
                raise TraincastError(
                    f"workload '{self.name}' was captured at one sequence length only ({self.seq_len})"
                )
        return replace(self, programs=tuple(p.resized(batch, seq) for p in self.programs))


def _check_range(what: str, value: int, largest: int) -> None:
    if not 1 <= value <= largest:
        raise TraincastError(f"{what} {value} is out of range; give a whole number from 1 to {largest}")
