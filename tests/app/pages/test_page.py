"""A page is one file, lets nothing in, and holds its data where nothing can break out."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from hashlib import sha256
from html import unescape

from traincast.app.pages.page import Html, Page, Section, encode_data, make_paragraph, render_page

EVIL = "</script><script>alert(1)</script><!--"


def page(**charts):
    section = Section(key="answer", title="How <long>", html=make_paragraph("ten"), charts=charts)
    return render_page(Page(title="a <b>", subtitle="&", sections=[section]))


def policy(html):
    return unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1])


def test_the_policy_names_the_hash_of_every_script_and_style_and_nothing_else():
    html = page()

    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        hashes = {f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts}
        (named,) = [part for part in policy(html).split("; ") if part.startswith(directive)]
        assert set(named.split()[1:]) == hashes
    assert policy(html).startswith("default-src 'none'; ")
    assert "unsafe" not in policy(html)


def test_a_page_refers_to_no_other_place():
    html = page()

    body = html.split("<body>")[1].split("<script>")[0]
    assert [place for place in re.findall(r'(?:src|href|action)="([^"]*)"', body) if not place.startswith("#")] == []
    assert "@import" not in html
    assert not re.search(r"url\((?!#)", html.split("<style>")[2])


def test_title_and_headings_are_escaped():
    html = page()

    assert "<title>a &lt;b&gt;</title>" in html
    assert "How &lt;long&gt;" in html
    assert '<p class="sub">&amp;</p>' in html


def test_data_cannot_end_its_element():
    html = page(evil={"names": [EVIL, "\u2028"]})
    (stored,) = re.findall(r'<script type="application/json" id="page-data">(.*?)</script>', html, re.DOTALL)

    assert json.loads(stored) == {"evil": {"names": [EVIL, "\u2028"]}}
    assert html.count("<script>") == 5


def test_data_is_ascii_and_has_no_character_of_markup():
    text = encode_data({"<&>": "é</script>"})

    assert text.isascii()
    assert not set("<>&") & set(text)


def test_every_section_is_named_and_linked():
    html = page()

    assert '<a href="#answer">' in html
    assert '<section id="answer" class="both" aria-labelledby="answer-title"><h2 id="answer-title">' in html


def test_html_of_sections_is_kept_as_it_is():
    section = Section(key="a", title="A", html=Html("<p>x</p>"))

    assert "<p>x</p></section>" in render_page(Page(title="t", subtitle="", sections=[section]))
