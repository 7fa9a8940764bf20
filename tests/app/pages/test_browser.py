"""Pages in a real browser: every section is drawn; zoom, hover, search and keys work; nothing leaves the page."""

from __future__ import annotations

import pytest

import traincast
from tests.browsing import DESK, PHONE
from tests.docs.pages import DOCS

TIMELINE = ".timeline canvas"
_REDRAWN = 100  # milliseconds of the page's clock: it draws again 80 after a change of size


@pytest.fixture(scope="module")
def prediction(tmp_path_factory):
    """The report of a prediction on two GPUs."""
    out = tmp_path_factory.mktemp("pages") / "prediction.html"
    traincast.write_report(traincast.predict("dlrm-ddp", on="dgx1-v100", gpus=2, batch_size=64), out, price=2.5)
    return out.as_uri()


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """The report of a traced run with its prediction."""
    out = tmp_path_factory.mktemp("pages") / "trace.html"
    traincast.write_report(traincast.trace(DOCS / "tutorial" / "example-trace.json", on="v100"), out)
    return out.as_uri()


@pytest.fixture
def page(browser, prediction):
    browser.open(prediction)
    return browser


def span(page):
    return page.run("Traincast.views[0].high - Traincast.views[0].low")


@pytest.mark.parametrize("kind", ["prediction", "traced"])
def test_every_section_is_drawn_without_complaint_or_request(browser, kind, request):
    url = request.getfixturevalue(kind)
    browser.open(url)

    drawn = browser.run("""[...document.querySelectorAll('[data-chart]')].map(figure => [figure.dataset.chart,
        [...figure.querySelectorAll('canvas')].some(canvas => {
          const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
          return new Set(pixels.filter((_, i) => i % 4 === 0)).size > 3; })])""")
    assert drawn and all(coloured for _, coloured in drawn), drawn
    texts = browser.run("[...document.querySelectorAll('section')].map(s => [s.id, s.innerText.length])")
    assert texts and all(length > 40 for _, length in texts), texts
    assert browser.complaints() == []
    assert [address for address in browser.requests() if address != url] == []


def test_keys_zoom_move_and_select(page):
    whole = span(page)
    page.keys(TIMELINE, "+++")
    assert span(page) == pytest.approx(whole * 0.7**3)
    low = page.run("Traincast.views[0].low")
    page.keys(TIMELINE, "\ue014")  # arrow right
    assert page.run("Traincast.views[0].low") == pytest.approx(low + 0.1 * span(page))
    page.keys(TIMELINE, "0")
    assert span(page) == pytest.approx(whole, rel=0.03)
    page.keys(TIMELINE, ".")
    first = page.find(".timeline .status").text
    page.keys(TIMELINE, ".")
    assert " from " in first and page.find(".timeline .status").text != first
    page.keys(TIMELINE, "/")
    assert page.run("document.activeElement.type") == "search"


def test_the_wheel_zooms_where_the_pointer_is_and_dragging_moves(page):
    whole = span(page)
    page.run("document.querySelector('.timeline').scrollIntoView({block: 'center'})")
    box = page.run(
        "(r => [r.left, r.top, r.width])(document.querySelector('.timeline canvas').getBoundingClientRect())"
    )
    x, y = box[0] + box[2] / 4, box[1] + 55

    page.cdp("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=-100, modifiers=2)
    page.until(f"Traincast.views[0].high - Traincast.views[0].low < {0.9 * whole}")
    low = page.run("Traincast.views[0].low")
    assert low > 0  # a quarter of what was left out is before
    page.cdp("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, button="left", clickCount=1)
    page.cdp("Input.dispatchMouseEvent", type="mouseMoved", x=x - 40, y=y, button="left", buttons=1)
    page.cdp("Input.dispatchMouseEvent", type="mouseReleased", x=x - 40, y=y, button="left", clickCount=1)
    page.until(f"Traincast.views[0].low > {low}")


def test_hovering_says_what_is_there(page):
    page.run("document.querySelector('.timeline').scrollIntoView({block: 'center'})")
    x, y = page.run("""(() => { const v = Traincast.views[0], box = v.canvas.getBoundingClientRect();
        const track = v.model.tracks[0], i = track.length.indexOf(Math.max(...track.length));
        return [box.left + v.x(track.start[i] + track.length[i] / 2), box.top + v.top(0) + 8]; })()""")

    page.cdp("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    page.until("!document.querySelector('.tip').hidden")
    assert " from " in page.find(".tip").text


def test_searching_finds_and_walks_through_matches(page):
    page.keys(".timeline input[type=search]", "embedding")
    assert "matches" in page.find(".timeline .status").text
    page.keys(".timeline input[type=search]", "\ue007")  # enter
    assert page.find(".timeline .status").text.startswith("match 1 of ")
    page.keys(".timeline input[type=search]", "\ue007")
    assert page.find(".timeline .status").text.startswith("match 2 of ")


def test_the_critical_path_can_be_hidden(page):
    shown = page.run("Traincast.views[0].canvas.toDataURL()")
    page.run("document.querySelector('.timeline input[type=checkbox]').click()")
    page.until("Traincast.views[0].pending === false")

    assert page.run("Traincast.views[0].canvas.toDataURL()") != shown


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["prediction", "traced"])
def test_an_accessibility_checker_finds_nothing_serious(browser, kind, scheme, request):
    browser.open(request.getfixturevalue(kind), scheme=scheme)
    browser.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")

    assert browser.violations() == []


def test_a_phone_scrolls_no_page_sideways(browser, prediction):
    browser.open(prediction, size=PHONE)

    assert browser.run("document.documentElement.scrollWidth") <= PHONE[0]
    assert browser.run("document.querySelector('.timeline canvas').getBoundingClientRect().width") <= PHONE[0]


@pytest.mark.parametrize(
    ("name", "look"),
    [("light", {}), ("dark", {"scheme": "dark"}), ("phone", {"size": PHONE}),
     ("print", {"media": "print", "scheme": "dark"})],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["prediction", "traced"])
def test_pages_look_as_when_they_were_looked_at(browser, kind, name, look, request):
    browser.open(request.getfixturevalue(kind), **look)
    browser.run("window.dispatchEvent(new Event('resize'))")
    width = look.get("size", DESK)[0]
    height = min(browser.run("document.documentElement.scrollHeight"), 4000)
    browser.cdp(
        "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
    )
    browser.settled(_REDRAWN)

    assert browser.unlike(f"{kind}-{name}") < 0.06
