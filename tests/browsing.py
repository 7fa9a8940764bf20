"""Headless Chromium for the tests of pages: opens them, presses keys, looks. Skips where there is none."""

from __future__ import annotations

import json
import os
import shutil
from base64 import b64decode, b64encode
from contextlib import suppress
from pathlib import Path

import pytest

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
REFERENCES = Path(__file__).parent / "app" / "pages" / "references"
DESK, PHONE = (1200, 900), (390, 844)
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--force-device-scale-factor=1", "--disable-background-networking", "--disable-component-update", "--no-first-run",
)  # fmt: skip
_COMPARE = """
const [given, kept, done] = arguments;
const load = (text, kind) => new Promise((yes, no) => { const i = new Image(); i.onload = () => yes(i); i.onerror = no;
  i.src = `data:image/${kind};base64,` + text; });
Promise.all([load(given, 'png'), load(kept, 'webp')]).then(both => {
  const [a, b] = both.map(image => { const c = document.createElement('canvas'); c.width = 48; c.height = 48;
    const p = c.getContext('2d'); p.drawImage(image, 0, 0, 48, 48); return p.getImageData(0, 0, 48, 48).data; });
  let sum = 0; for (let i = 0; i < a.length; i++) sum += Math.abs(a[i] - b[i]);
  done(sum / a.length / 255);
}, () => done(1));
"""
_SETTLED = """
const [milliseconds, done] = arguments, drawn = () => requestAnimationFrame(() => requestAnimationFrame(() => done()));
milliseconds ? setTimeout(drawn, milliseconds) : drawn();
"""
_PATIENCE = 120  # seconds: on a busy machine a page may take long, and what never comes is found all the same
_SHRINK = """
const [text, width, done] = arguments, image = new Image();
image.onload = () => { const c = document.createElement('canvas'); c.width = width;
  c.height = Math.round(image.height * width / image.width);
  const p = c.getContext('2d'); p.imageSmoothingQuality = 'high'; p.drawImage(image, 0, 0, c.width, c.height);
  done(c.toDataURL('image/webp', 0.6).split(',')[1]); };
image.src = 'data:image/png;base64,' + text;
"""


class Browser:
    """A browser with one page."""

    def __init__(self, driver):
        self.driver = driver

    def open(self, url, *, size=DESK, scheme="light", media="screen"):
        """Opens an address in a window of this size, light or dark, on screen or as printed."""
        self.cdp("Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=1,
                 mobile=size[0] < 600)  # fmt: skip
        self.cdp(
            "Emulation.setEmulatedMedia", media=media, features=[{"name": "prefers-color-scheme", "value": scheme}]
        )
        self.driver.get("about:blank")
        self.complaints()
        self.requests()
        self.driver.get(url)
        self.settled()

    def settled(self, milliseconds=0):
        """Waits until the page has drawn what it was about to; timers of the page that are due by then have run."""
        self.driver.execute_async_script(_SETTLED, milliseconds)

    def cdp(self, command, **arguments):
        return self.driver.execute_cdp_cmd(command, arguments)

    def run(self, script, *arguments):
        """The value of an expression in the page."""
        return self.driver.execute_script(f"return {script}", *arguments)

    def find(self, selector):
        return self.driver.find_element("css selector", selector)

    def keys(self, selector, text):
        self.find(selector).send_keys(text)

    def until(self, wanted, seconds=_PATIENCE):
        """Waits until an expression of the page, or a function without arguments, is true; gives what it is."""
        from selenium.webdriver.support.ui import WebDriverWait

        ask = (lambda _: wanted()) if callable(wanted) else (lambda _: self.run(wanted))
        return WebDriverWait(self.driver, seconds, poll_frequency=0.03).until(ask)

    def complaints(self):
        """What the console has complained of since it was asked last."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self):
        """Addresses that were asked for since this was asked last."""
        sent = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [e["params"]["request"]["url"] for e in sent if e["method"] == "Network.requestWillBeSent"]

    def violations(self):
        """Serious findings of axe-core: which rule, and where first."""
        self.driver.execute_script(AXE.read_text(encoding="utf-8"))
        found = self.driver.execute_async_script(
            "const done = arguments[0]; axe.run(document, {resultTypes: ['violations']}).then(r => done(r.violations))"
        )
        return [(v["id"], v["nodes"][0]["target"], v["nodes"][0]["any"][:1]) for v in found
                if v["impact"] in ("serious", "critical")]  # fmt: skip

    def unlike(self, name):
        """How much the page differs (0 to 1, at 48 x 48 pixels) from the picture that was kept of it; with
        TRAINCAST_KEEP_PICTURES set, the picture is kept anew."""
        text = self.driver.get_screenshot_as_base64()
        self.driver.get("about:blank")
        kept = REFERENCES / f"{name}.webp"
        if os.environ.get("TRAINCAST_KEEP_PICTURES"):
            kept.write_bytes(b64decode(self.driver.execute_async_script(_SHRINK, text, 320)))
        reference = b64encode(kept.read_bytes()).decode()
        return self.driver.execute_async_script(_COMPARE, text, reference)


def chromium():
    """Chromium under Selenium."""
    from selenium import webdriver
    from selenium.common.exceptions import WebDriverException
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    program, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if not program or not driver:
        pytest.skip("no chromium or no chromedriver here; 'apt-get install chromium chromium-driver' to run this test")
    options = Options()
    options.binary_location = program
    for flag in _FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    for _ in range(2):
        with suppress(WebDriverException):
            return webdriver.Chrome(options=options, service=Service(driver))
    return pytest.skip("chromium is installed and does not start; run it by hand to see why")


@pytest.fixture(scope="session")
def browser():
    """One browser for all tests of a process."""
    driver = chromium()
    driver.set_script_timeout(_PATIENCE)
    yield Browser(driver)
    driver.quit()
