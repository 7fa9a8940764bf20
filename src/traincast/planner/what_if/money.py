"""What steps cost in dollars, hours and energy, and one step on several platforms side by side, for who buys or
rents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from traincast.hardware.platform import Platform, list_platform_keys, load_platform
from traincast.hardware.sheet import read_table
from traincast.simulator.prediction.result import Prediction, state_verdict
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.resolved import resolve
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.display.text import format_dollars, shorten_name
from traincast.utils.errors import TraincastError, make_unknown_error, shorten_value
from traincast.utils.results import Records, Result, drop_nested_values

_HOUR = 3600.0
_MOST = 1e18
_MOST_DOLLARS = 1e9


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What the user says: dollars of one GPU for an hour (a number, or by platform and GPU, as `choose_prices` gives
    them), samples or tokens of the whole run."""

    per_gpu_hour: float | Mapping[str, float] | None = None
    samples: float | None = None
    tokens: float | None = None

    def __post_init__(self) -> None:
        for name in ("per_gpu_hour", "samples", "tokens"):
            value = getattr(self, name)
            if isinstance(value, float | int) and not 0 < value < _MOST:
                option = "price" if name == "per_gpu_hour" else name
                raise TraincastError(f"`{option}` {value:g} is out of range; give a number above 0")

    def find(self, platform: Platform) -> float | None:
        """Dollars of one GPU of a platform for an hour."""
        if isinstance(self.per_gpu_hour, Mapping):
            return find_price(self.per_gpu_hour, platform.key, platform.device.key)
        return self.per_gpu_hour


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
    platforms = list_platform_keys()
    for name, dollars in known.items():
        if name not in ("", *platforms) and any(key.startswith(name.lower()) for key in platforms):
            raise make_unknown_error("platform of a price", name, platforms, "See 'traincast platforms'.")
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
        gpus=gpus, seconds=result.iteration, samples=samples, tokens=tokens, price=prices.find(result.platform),
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
        name, _, number = (word.strip() for word in part.rpartition("="))
        if name in prices:
            of = f"of {shorten_name(name)}" if name else "of all GPUs"
            raise TraincastError(f"`price` {shorten_name(text)}: one price {of}, such as 2.5")
        try:
            prices[name] = float(number.removeprefix("$"))
        except ValueError:
            raise TraincastError(
                f"`price` {shorten_name(part.strip())}: give dollars per GPU and hour (2.5), or h100=2.5"
            ) from None
    return prices


def make_prices(
    price: float | str | Mapping[str, float] | None, *, samples: float | None = None, tokens: float | None = None
) -> Prices:
    """What `choose_prices` understands as prices, with the samples or tokens of the run; no dollars without one."""
    if isinstance(price, str | Mapping):
        price = choose_prices(price)[0] or None
    return Prices(per_gpu_hour=price, samples=samples, tokens=tokens)


def find_price(prices: Mapping[str, float], platform: str, device: str) -> float | None:
    """The price of a platform: its own, that of its GPU, or that of all."""
    return next((prices[name] for name in (platform, device, "") if name in prices), None)


def find_one_price(price: str, platform: str, device: str) -> float:
    """Dollars of one GPU of a platform for an hour, from text that `choose_prices` reads."""
    dollars = find_price(choose_prices(price)[0], platform, device)
    if dollars is None:
        raise TraincastError(f"no list price of {device or 'this GPU'} is known; give one in dollars, such as 2.5")
    return dollars


MOST_PLATFORMS = 64


@dataclass(frozen=True, eq=False, kw_only=True)
class PlatformStep:
    """A step on one of the platforms and what it costs."""

    platform: str
    prediction: Prediction
    cost: Cost

    @property
    def seconds_per_sample(self) -> float:
        """Of all GPUs together."""
        return self.prediction.iteration / self.cost.samples

    @property
    def dollars(self) -> float | None:
        """Of a billion tokens, or of a million samples of a model without tokens; None without a price."""
        units = 1e9 / self.cost.tokens if self.cost.tokens else 1e6 / self.cost.samples
        return None if self.cost.dollars_per_step is None else self.cost.dollars_per_step * units

    def to_dict(self) -> dict[str, Any]:
        """As plain data; keys say their units."""
        p = self.prediction
        return {
            "platform": self.platform,
            "device": p.platform.device.name,
            "gpus": p.gpus,
            "iteration_ms": 1e3 * p.iteration,
            "interval_ms": [1e3 * limit for limit in p.interval],
            "samples_per_s": p.throughput.samples,
            "tokens_per_s": p.throughput.tokens or None,
            "memory_gb": p.needed_bytes / 1e9,
            "device_memory_gb": p.platform.device.memory_bytes / 1e9,
            "fits": p.fits,
            "trust": p.trust.word,
            "extrapolated": p.trust.extrapolated,
            "price": self.cost.price,
            **{name: value for name, value in self.cost.to_dict().items() if name not in ("gpus", "run_steps")},
        }


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class PlatformComparison(Result):
    """The same step on every platform that could be predicted, fastest first; `failed` says why the others could not,
    `priced` where prices come from ("": none)."""

    name: str
    steps: tuple[PlatformStep, ...]
    failed: dict[str, str]
    priced: str = ""

    @property
    def fastest(self) -> PlatformStep:
        """The shortest time of a sample among those that fit (of all, where none does)."""
        return min(self._usable, key=lambda step: step.seconds_per_sample)

    @property
    def cheapest(self) -> PlatformStep | None:
        """The least dollars among those that fit and have a price."""
        priced = [step for step in self._usable if step.dollars is not None]
        return min(priced, key=lambda step: step.dollars or 0.0) if priced else None

    @property
    def _usable(self) -> Sequence[PlatformStep]:
        return [step for step in self.steps if step.prediction.fits] or self.steps

    @property
    def unit(self) -> str:
        """What dollars buy: `billion tokens` or `million samples`."""
        return "billion tokens" if self.steps[0].cost.tokens else "million samples"

    def headline(self) -> str:
        """Which is fastest, which is cheapest, which do not fit."""
        first, least = self.fastest, self.cheapest
        lines = [f"{self.name}: {first.platform} is fastest, {state_verdict(first.prediction)[0]}"]
        if least is not None and least.dollars is not None:
            slower = least.seconds_per_sample / first.seconds_per_sample
            rest = "" if least is first else f", {slower:.1f} times as long per sample"
            lines.append(f"{least.platform} is cheapest, {format_dollars(least.dollars)} per {self.unit}{rest}.")
        lines.append(first.prediction.trust.sentence)
        tight = [step.platform for step in self.steps if not step.prediction.fits]
        return "\n".join([*lines, *([f"It does not fit on {', '.join(tight)}."] if tight else [])])

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "workload": self.name,
            "fastest": self.fastest.platform,
            "cheapest": self.cheapest.platform if self.cheapest else None,
            "prices": self.priced or None,
            "rows": [step.to_dict() for step in self.steps],
            "failed": self.failed,
        }

    def records(self) -> Records:
        """Table "platforms": one row each."""
        return {"platforms": [drop_nested_values(step.to_dict()) for step in self.steps]}


def compare_platforms(
    scenario: Scenario,
    platforms: Sequence[str],
    prices: Mapping[str, float],
    *,
    samples: float | None = None,
    tokens: float | None = None,
    priced: str = "",
    progress: Callable[[float], None] = lambda _: None,
) -> PlatformComparison:
    """Predicts a scenario on every platform; `prices` are dollars of one GPU for an hour by platform or device,
    `samples` or `tokens` those of a whole run."""
    names = list(dict.fromkeys(name.strip() for name in platforms if name.strip()))
    if not 1 <= len(names) <= MOST_PLATFORMS:
        raise TraincastError(f"`on` names {len(names)} platforms; give 1 to {MOST_PLATFORMS}")
    for name in names:
        load_platform(name)  # a misspelt one among several is an error, not a shorter table
    steps, failed = [], {}
    for number, name in enumerate(names):
        try:
            result = predict(resolve(scenario.replace(on=name)))
        except TraincastError as error:
            failed[name] = str(error)
        else:
            price = find_price(prices, name, result.platform.device.key)
            cost = compute_cost(result, Prices(per_gpu_hour=price, samples=samples, tokens=tokens))
            steps.append(PlatformStep(platform=name, prediction=result, cost=cost))
        progress((number + 1) / len(names))
    if not steps:
        raise TraincastError(next(iter(failed.values())))
    return PlatformComparison(
        name=steps[0].prediction.workload.name,
        steps=tuple(sorted(steps, key=lambda step: step.seconds_per_sample)),
        failed=failed,
        priced=priced if any(step.cost.price is not None for step in steps) else "",
    )
