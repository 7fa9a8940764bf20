#!/usr/bin/env python
"""Draws the pictures of reports in docs/images from real output: `traincast report` writes pages, Chromium shows them.

    .venv/bin/python scripts/draw_pages.py

Needs chromium and chromedriver, and the measurements ($TRAINCAST_DATA) for the traced ResNet.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from base64 import b64decode
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.browsing import Browser, chromium  # noqa: E402 - beside the package, not part of it

IMAGES = ROOT / "docs" / "images"
DATA = Path(os.environ.get("TRAINCAST_DATA", ROOT.parent / "shared" / "data"))
TRACE = DATA / "traces" / "kineto_resnet50_v100" / "num_workers_4.json.gz"
REPORTS = {
    "report-dlrm": ("dlrm-default", "--on", "v100", "--batch-size", "2048", "--price", "2.50"),
    "report-resnet": (str(TRACE), "--on", "v100"),
}
SECTIONS = {"report-dlrm": ("answer", "why", "timeline"), "report-resnet": ("answer", "why", "timeline")}
WIDTH, MOST_HEIGHT = 1280, 2600
_AS_WEBP = """
const [text, done] = arguments, image = new Image();
image.onload = () => { const c = document.createElement('canvas'); c.width = image.width; c.height = image.height;
  c.getContext('2d').drawImage(image, 0, 0); done(c.toDataURL('image/webp', 0.8).split(',')[1]); };
image.src = 'data:image/png;base64,' + text;
"""


def drawn(browser: Browser, page: Path, keys: tuple[str, ...]) -> bytes:
    """The top of a page and the sections wanted, as a picture (WebP)."""
    browser.open(page.as_uri(), size=(WIDTH, 900))
    browser.run(
        "document.querySelectorAll('section').forEach(s => { s.hidden = !arguments[0].includes(s.id); })", list(keys)
    )
    height = min(browser.run("document.documentElement.scrollHeight"), MOST_HEIGHT)
    browser.cdp("Emulation.setDeviceMetricsOverride", width=WIDTH, height=height, deviceScaleFactor=1, mobile=False)
    browser.run("window.dispatchEvent(new Event('resize'))")
    browser.driver.execute_async_script("setTimeout(arguments[0], 400)")
    text = browser.driver.get_screenshot_as_base64()
    browser.driver.get("about:blank")
    return b64decode(browser.driver.execute_async_script(_AS_WEBP, text))


def main() -> None:
    driver = chromium()
    browser = Browser(driver)
    try:
        for name, arguments in REPORTS.items():
            with tempfile.TemporaryDirectory() as folder:
                page = Path(folder) / "report.html"
                command = [sys.executable, "-m", "traincast", "report", *arguments, "-o", str(page)]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                (IMAGES / f"{name}.webp").write_bytes(drawn(browser, page, SECTIONS[name]))
            print(f"docs/images/{name}.webp")
    finally:
        driver.quit()


if __name__ == "__main__":
    main()
