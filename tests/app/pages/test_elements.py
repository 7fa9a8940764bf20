"""Pieces of HTML: exact text, and nothing of what comes in gets out unescaped."""

from __future__ import annotations

import pytest

from traincast.app.pages import page
from traincast.app.pages.page import Html, escape_html

EVIL = "<img src=x onerror=alert(1)>\"'&"
ESCAPED = "&lt;img src=x onerror=alert(1)&gt;&quot;&#x27;&amp;"


@pytest.mark.parametrize(
    "html",
    [
        page.make_paragraph(EVIL),
        page.make_paragraph("a", EVIL),
        page.make_heading(EVIL),
        page.make_list([EVIL]),
        page.make_facts([(EVIL, EVIL)]),
        page.make_table((EVIL,), [(EVIL,)], caption=EVIL),
        page.fold_block(EVIL, EVIL),
        page.make_stack([(EVIL, 1.0, EVIL)], EVIL),
        page.make_chart(EVIL, EVIL, EVIL),
        page.join_blocks([EVIL]),
    ],
)
def test_every_piece_escapes_what_it_is_given(html):
    assert ESCAPED in html
    assert "<img" not in html


def test_html_is_not_escaped_twice():
    assert escape_html(Html("<b>")) == "<b>"
    assert escape_html(escape_html("<b>")) == "&lt;b&gt;"


def test_a_table_aligns_numbers_and_can_be_scrolled_by_keyboard():
    html = page.make_table(("op", "ms"), [("mm", "1.5")], right=(1,), caption="Ops")

    assert html == (
        '<div class="wide" tabindex="0" role="region" aria-label="Ops"><table><caption>Ops</caption><thead><tr>'
        '<th scope="col">op</th><th class="n" scope="col">ms</th></tr></thead><tbody><tr><td>mm</td>'
        '<td class="n">1.5</td></tr></tbody></table></div>'
    )


def test_a_stack_divides_its_width_by_shares_and_leaves_out_what_is_nothing():
    html = page.make_stack([("computing", 3.0, "3 ms"), ("idle", 0.0, "0 ms"), ("waiting", 1.0, "1 ms")], "Step")

    assert 'x="0.0" width="750.0"' in html
    assert 'x="750.0" width="250.0"' in html
    assert 'aria-label="Step: computing 3 ms, waiting 1 ms"' in html
    assert "idle" not in html


@pytest.mark.parametrize(("share", "width"), [(0.25, "25.00"), (-1.0, "0.00"), (7.0, "100.00")])
def test_a_bar_stays_in_its_cell(share, width):
    assert f'width="{width}"' in page.make_bar(share)


def test_nothing_needs_a_style_of_its_own():
    pieces = (
        page.make_bar(0.5) + page.make_stack([("a", 1.0, "1")], "x") + page.make_table(("a",), [("b",)], caption="c")
    )

    assert "style=" not in pieces


def test_an_empty_list_is_nothing():
    assert page.make_list([]) == ""
