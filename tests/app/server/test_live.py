"""The live page in a real browser, and a short slice of the load that a server has to carry."""

from __future__ import annotations

import asyncio
import json
import runpy
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest

from tests.app.server.starting import server
from traincast.app.server.fields import parse_request

ROOT = Path(__file__).resolve().parents[3]
ASKED = "?workload=dlrm-default&on=v100&batch_size=256"
LISTENING = b"""<!doctype html><title>listening</title><script>
addEventListener('message', event => {
  if (event.data === 'PING') event.source.postMessage('PONG', event.origin);
  else if (event.data.perfetto) document.title = 'got ' + event.data.perfetto.buffer.byteLength;
});</script>"""


class Listening(BaseHTTPRequestHandler):
    """A page that takes a trace as Perfetto's does."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(LISTENING)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def perfetto():
    other = ThreadingHTTPServer(("127.0.0.1", 0), Listening)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{other.server_port}"
    other.shutdown()


@pytest.fixture(scope="module")
def url(perfetto):
    with server("--perfetto", perfetto) as (_, url):
        yield url


def opened(browser, url):
    browser.open(url)
    browser.until("document.querySelector('main .answer') && !document.querySelector('main').ariaBusy")


def test_a_change_is_asked_for_and_is_in_the_address(browser, url):
    opened(browser, url + ASKED)
    before = browser.find("main .answer").text

    # at once: keys that come slowly are several changes
    browser.run("""(field => { field.value = '4096'; field.dispatchEvent(new Event('change', {bubbles: true})); })(
        document.getElementById('f-batch_size'))""")

    browser.until(
        "document.querySelector('main .answer').innerText !== arguments[0]".replace("arguments[0]", json.dumps(before))
    )
    assert "batch_size=4096" in browser.driver.current_url
    browser.driver.back()
    browser.until(f"document.querySelector('main .answer').innerText === {json.dumps(before)}")
    assert browser.run("document.getElementById('f-batch_size').value") == "256"
    assert browser.complaints() == []
    assert {urlsplit(address).netloc for address in browser.requests()} <= {urlsplit(url).netloc, ""}


def test_what_the_timeline_shows_is_in_the_address_and_comes_back(browser, url):
    opened(browser, url + ASKED)
    browser.keys(".timeline canvas", "++")
    browser.keys(".timeline input[type=search]", "gemm")
    browser.until("location.search.includes('view=') && location.search.includes('gemm')")
    shown = browser.run("Traincast.views[0].high - Traincast.views[0].low")

    opened(browser, browser.driver.current_url)

    assert browser.run("Traincast.views[0].high - Traincast.views[0].low") == pytest.approx(shown, rel=1e-3)
    assert browser.run("document.querySelector('.timeline input[type=search]').value") == "gemm"


def test_a_wrong_field_is_marked(browser, url):
    browser.open(url + ASKED + "&tp=3&gpus=0")

    browser.until("document.getElementById('said').className === 'wrong'")
    assert browser.run("document.querySelector('[aria-invalid]').name") == "gpus"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_accessibility_checker_finds_nothing_serious(browser, url, scheme):
    browser.open(url + ASKED, scheme=scheme)
    browser.until("document.querySelector('main .answer')")
    assert browser.violations() == []


def test_home_has_a_task_for_everything_and_every_example_is_a_question(browser, url):
    browser.open(url)

    tasks = browser.run("[...document.querySelectorAll('.tasks a')].map(a => a.getAttribute('href'))")
    assert len(tasks) == 8 and tasks[-1] == "#file"
    for task in tasks[:-1]:
        parse_request(parse_qsl(task.partition("?")[2]))  # nothing in it is rejected
    groups = browser.run("[...document.querySelectorAll('#f-workload optgroup')].map(g => g.label)")
    assert "Recommenders" in groups and "Transformers, laid out over gpus" in groups
    assert browser.violations() == []


def test_two_answers_stand_side_by_side_and_both_are_in_the_address(browser, url):
    opened(browser, url + ASKED)
    browser.find("#keep").click()
    browser.run("""(field => { field.value = 'h100'; field.dispatchEvent(new Event('change', {bubbles: true})); })(
        document.getElementById('f-on'))""")

    browser.until("document.getElementById('title').textContent.includes('H100')")
    assert "V100" in browser.find("#kept h2").text
    assert browser.run("document.querySelectorAll('#kept .answer, #main .answer').length") == 2
    opened(browser, browser.driver.current_url)
    browser.until("!document.getElementById('kept').hidden")
    assert browser.violations() == []


def test_perfetto_is_handed_the_timeline(browser, url):
    opened(browser, url + ASKED)
    first = browser.driver.current_window_handle

    browser.find("#perfetto").click()

    (other,) = browser.until(lambda: set(browser.driver.window_handles) - {first})
    browser.driver.switch_to.window(other)
    browser.until("document.title.startsWith('got ')")
    assert int(browser.driver.title.split()[1]) > 10_000
    browser.driver.close()
    browser.driver.switch_to.window(first)


def test_two_hundred_requests_a_second_are_answered(url):
    asked = runpy.run_path(str(ROOT / "benchmarks" / "serve.py"))["asked"]

    result = asyncio.run(asked("127.0.0.1", urlsplit(url).port, 200, 1.5, 0))

    assert result["failed"] == 0
    assert result["requests"] == 300
