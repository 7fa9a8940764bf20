"""What steps cost: dollars from the user's price or dated list prices, hours, and energy where a power limit is
known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from traincast.hardware.files import read_table
from traincast.simulator.prediction.result import Prediction
from traincast.utils.errors import TraincastError, shorten_value

_HOUR = 3600.0
_MOST = 1e18
_MOST_DOLLARS = 1e9


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What the user says: dollars of one GPU for an hour, samples or tokens of the whole run."""

    per_gpu_hour: float | None = None
    samples: float | None = None
    tokens: float | None = None

    def __post_init__(self) -> None:
        for name in ("per_gpu_hour", "samples", "tokens"):
            value = getattr(self, name)
            if value is not None and not 0 < value < _MOST:
                option = "price" if name == "per_gpu_hour" else name
                raise TraincastError(f"`{option}` {value:g} is out of range; give a number above 0")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a step and a run cost; None is not known. Seconds, dollars, joules (an upper limit: all GPUs at their power
    limit all the time)."""

    gpus: int
    seconds: float
    samples: int
    tokens: int
    price: float | None
    watts: float | None
    run_steps: float | None

    @property
    def dollars_per_step(self) -> float | None:
        """Price times GPUs times hours."""
        return None if self.price is None else self.price * self.gpus * self.seconds / _HOUR

    @property
    def joules_per_step(self) -> float | None:
        """At most so much energy."""
        return None if self.watts is None else self.watts * self.gpus * self.seconds

    def to_dict(self) -> dict[str, Any]:
        """As plain data; what is not known is None."""
        per_step, joules, steps = self.dollars_per_step, self.joules_per_step, self.run_steps
        return {
            "gpus": self.gpus,
            "samples_per_step": self.samples,
            "tokens_per_step": self.tokens or None,
            "gpu_hours_per_million_samples": 1e6 * self.gpus * self.seconds / self.samples / _HOUR,
            "dollars_per_step": per_step,
            "dollars_per_million_samples": None if per_step is None else 1e6 * per_step / self.samples,
            "dollars_per_million_tokens": None if per_step is None or not self.tokens else 1e6 * per_step / self.tokens,
            "most_joules_per_step": joules,
            "most_kwh_per_million_samples": None if joules is None else joules / self.samples / 3.6,
            "run_steps": steps,
            "run_hours": None if steps is None else steps * self.seconds / _HOUR,
            "run_gpu_hours": None if steps is None else steps * self.gpus * self.seconds / _HOUR,
            "run_dollars": None if steps is None or per_step is None else steps * per_step,
            "run_most_kwh": None if steps is None or joules is None else steps * joules / 3.6e6,
        }


def read_prices(price: float | Mapping[str, float] | None) -> dict[str, float]:
    """Dollars of a GPU and hour by platform; "" is for all others."""
    if price is None:
        return {}
    known = dict(price) if isinstance(price, Mapping) else {"": price}
    for name, dollars in known.items():
        if isinstance(dollars, bool) or not isinstance(dollars, int | float) or not 0 < dollars < _MOST_DOLLARS:
            where = f" of {name}" if name else ""
            raise TraincastError(f"`price`{where} must be a number above 0, not {shorten_value(dollars)}")
    return known


def compute_cost(result: Prediction, prices: Prices) -> Cost:
    """The cost of a predicted step."""
    gpus, samples, per_sample = result.gpus, result.workload.samples * result.gpus, result.workload.seq_len
    if result.parallel is not None:
        samples, per_sample = result.parallel.layout.global_batch, result.parallel.layout.seq_len
    tokens = samples * per_sample
    if prices.tokens is not None and not tokens:
        raise TraincastError("the model has no tokens; give the `samples` of the run instead")
    if prices.tokens is not None and prices.samples is not None:
        raise TraincastError("`samples` and `tokens` both say how long the run is; give one of them")
    steps = None
    if prices.samples is not None:
        steps = prices.samples / samples
    elif prices.tokens is not None:
        steps = prices.tokens / tokens
    return Cost(
        gpus=gpus, seconds=result.iteration, samples=samples, tokens=tokens, price=prices.per_gpu_hour,
        watts=result.platform.device.power_limit_watts, run_steps=steps,
    )  # fmt: skip


@cache
def load_list_prices() -> tuple[dict[str, float], str]:
    """Dollars of one GPU for an hour by device, and where and when they were found."""
    table = read_table(files("traincast.planner.what_if") / "data" / "prices.toml")
    return dict(table["dollars_per_gpu_hour"]), f"{table['source']}, {table['date']}"


def choose_prices(price: float | str | Mapping[str, float] | None) -> tuple[dict[str, float], str]:
    """Dollars of one GPU for an hour by platform or device ("" is for all others), and where they come from: what was
    given (as a number, a table, or text such as `h100=2.5,a100-80gb=1.6`), and for others the list; `list` is
    that alone, `none` none."""
    if isinstance(price, str) and price.strip() == "none":
        return {}, ""
    price = None if isinstance(price, str) and price.strip() == "list" else price
    given = read_prices(_parse_prices(price) if isinstance(price, str) else price)
    if "" in given:
        return given, "as given"
    listed, source = load_list_prices()
    return {**listed, **given}, f"as given, else {source}" if given else source


def _parse_prices(text: str) -> dict[str, float]:
    prices: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.strip().rpartition("=")
        try:
            prices[name.strip()] = float(number.removeprefix("$"))
        except ValueError:
            raise TraincastError(f"`price` {part.strip()}: give dollars per GPU and hour (2.5), or h100=2.5") from None
    return prices


def find_price(prices: Mapping[str, float], platform: str, device: str) -> float | None:
    """The price of a platform: its own, that of its GPU, or that of all."""
    return next((prices[name] for name in (platform, device, "") if name in prices), None)
