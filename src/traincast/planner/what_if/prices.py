"""List prices of GPUs, dated, and prices as people write them: `2.5`, `h100=2.5,a100-80gb=1.6`, `none`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from traincast.hardware.files import read_table
from traincast.planner.what_if.money import read_prices
from traincast.utils.errors import TraincastError


@cache
def load_list_prices() -> tuple[dict[str, float], str]:
    """Dollars of one GPU for an hour by device, and where and when they were found."""
    table = read_table(files("traincast.planner.what_if") / "data" / "prices.toml")
    return dict(table["dollars_per_gpu_hour"]), f"{table['source']}, {table['date']}"


def choose_prices(price: float | str | Mapping[str, float] | None) -> tuple[dict[str, float], str]:
    """Dollars of one GPU for an hour by platform or device ("" is for all others), and where they come from: what was
    given (as a number, a table, or text such as `h100=2.5,a100-80gb=1.6`), and for others the list; `none` for none."""
    if isinstance(price, str) and price.strip() == "none":
        return {}, ""
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
