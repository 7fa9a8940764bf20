"""How smooth a report's timeline is: first paint, and frames a second while it zooms and moves, in headless Chromium.

    python benchmarks/page.py [--slices 20000] [--json]

Frames are counted by requestAnimationFrame on the page and on an empty one in the same browser; their ratio is what the
page costs, whatever the machine. Bars: first paint below 1 s, 30 frames a second or more.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.browsing import Browser, chromium

from traincast.app.pages.charts import make_timeline_data
from traincast.app.pages.page import Page, Section, make_chart, render_page

_FRAMES = """
const [move, seconds, done] = arguments;
const begin = performance.now(); let last = begin, longest = 0, count = 0;
const step = now => {
  if (count) longest = Math.max(longest, now - last);
  last = now; count++;
  if (window.Traincast && move) {
    const v = Traincast.views[0], turn = (now - begin) / 1000;
    if (move === 'zoom') v.zoom(Math.sin(3 * turn) > 0 ? 0.94 : 1.06, v.width / 3);
    else v.pan(Math.sin(2 * turn) > 0 ? 0.02 : -0.02);
  }
  if (now - begin < 1000 * seconds) requestAnimationFrame(step);
  else done({fps: 1000 * (count - 1) / (now - begin), longest_ms: longest});
};
requestAnimationFrame(step);
"""


def document(slices: int) -> dict[str, Any]:
    """A Chrome trace of this many slices on eight ranks with a host thread and two streams each."""
    rng = random.Random(19)
    events: list[dict[str, Any]] = []
    tracks = [(rank, place) for rank in range(8) for place in range(3)]
    for rank in range(8):
        for side, name in ((0, "host"), (1, "device")):
            events.append(
                {"ph": "M", "name": "process_name", "pid": 2 * rank + side, "args": {"name": f"rank {rank}: {name}"}}
            )
    for rank, place in tracks:
        clock = 0.0
        for _ in range(slices // len(tracks)):
            length = rng.expovariate(1 / 9.0)
            name = rng.choice(("gemm_128x128", "embedding_bag", "elementwise_add", "reduce", "ncclAllToAll"))
            events.append(
                {
                    "ph": "X",
                    "cat": "op" if place == 0 else "kernel",
                    "name": name,
                    "pid": 2 * rank + (place > 0),
                    "tid": place,
                    "ts": clock,
                    "dur": length,
                    "args": {"op": f"aten::{name}"},
                }
            )
            clock += length + rng.expovariate(1 / 3.0)
    return {"traceEvents": events}


def written(slices: int, folder: Path) -> tuple[str, str]:
    """Addresses of the page with the timeline, and of an empty one."""
    data = make_timeline_data(document(slices))
    section = Section(
        key="timeline", title="Timeline", html=make_chart("timeline", "Timeline"), charts={"timeline": data}
    )
    page, empty = folder / "page.html", folder / "empty.html"
    page.write_text(render_page(Page(title="Twenty thousand", subtitle="", sections=[section])), encoding="utf-8")
    empty.write_text("<!doctype html><title>empty</title><p>empty</p>", encoding="utf-8")
    return page.as_uri(), empty.as_uri()


def first_paint(browser: Browser, url: str) -> float:
    """Seconds from navigation to when the timeline has been drawn and shown."""
    browser.open(url)
    return browser.driver.execute_async_script(
        "const done = arguments[0], frame = requestAnimationFrame; "
        "frame(() => frame(() => done(performance.now() / 1e3)))"
    )


def frames(browser: Browser, url: str, move: str, seconds: float) -> dict[str, float]:
    """Frames a second, and the longest between two (ms)."""
    browser.open(url)
    return browser.driver.execute_async_script(_FRAMES, move, seconds)


def measured(slices: int, seconds: float) -> dict[str, Any]:
    """All figures."""
    driver = chromium()
    driver.set_script_timeout(60)
    browser = Browser(driver)
    try:
        with tempfile.TemporaryDirectory() as folder:
            page, empty = written(slices, Path(folder))
            paints = sorted(first_paint(browser, page) for _ in range(5))
            nothing = sorted(first_paint(browser, empty) for _ in range(5))
            result: dict[str, Any] = {
                "slices": slices,
                "first_paint_s": statistics.median(paints),
                "empty_first_paint_s": statistics.median(nothing),
            }
            base = frames(browser, empty, "", seconds)["fps"]
            result["empty_fps"] = base
            for move in ("zoom", "pan"):
                got = frames(browser, page, move, seconds)
                result[move] = {**got, "ratio_to_empty": got["fps"] / base}
            return result
    finally:
        driver.quit()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each count of frames")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measured(args.slices, args.seconds)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        paint, nothing = result["first_paint_s"], result["empty_first_paint_s"]
        print(f"{args.slices:,} slices: first paint {paint:.3f} s (an empty page {nothing:.3f})")
        for move in ("zoom", "pan"):
            got = result[move]
            print(
                f"{move}: {got['fps']:.1f} frames/s, {got['ratio_to_empty']:.2f} of an empty page's "
                f"{result['empty_fps']:.1f}, longest frame {got['longest_ms']:.0f} ms"
            )
    good = result["first_paint_s"] < 1 and all(result[move]["fps"] >= 30 for move in ("zoom", "pan"))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
