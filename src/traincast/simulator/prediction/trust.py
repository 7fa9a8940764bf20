"""How far a prediction rests on measurements: the share of its kernel time outside what was fitted, with a word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_MEASURED, _PARTLY = 0.05, 0.5  # shares of kernel time: below the first next to nothing is extrapolated


@dataclass(frozen=True, slots=True)
class Trust:
    """`outside` is the share of kernel time whose sizes, types or GPU no kernel model was fitted on, `estimated` that
    of ops without a model; `why` names the op that matters most outside."""

    outside: float
    estimated: float
    why: str = ""

    @property
    def extrapolated(self) -> float:
        """Both together, at most 1."""
        return min(self.outside + self.estimated, 1.0)

    @property
    def word(self) -> str:
        """measured, partly extrapolated, or mostly extrapolated."""
        beyond = self.extrapolated
        return "measured" if beyond < _MEASURED else f"{'partly' if beyond < _PARTLY else 'mostly'} extrapolated"

    @property
    def sentence(self) -> str:
        """The word with its share and its reason: `Mostly extrapolated: 97% of kernel time ... (aten::mm: ...)`."""
        if self.extrapolated < _MEASURED:
            return f"Measured: {1 - self.extrapolated:.0%} of kernel time is of sizes and GPUs that were measured."
        parts = [f"{self.outside:.0%} of kernel time lies outside what was fitted"] if self.outside >= 0.005 else []
        parts += [f"{self.estimated:.0%} has no kernel model"] if self.estimated >= 0.005 else []
        reason = f" ({self.why})" if self.why else ""
        return f"{self.word.capitalize()}: {', '.join(parts)}{reason}."

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"word": self.word, "extrapolated": self.extrapolated, "why": self.why}
