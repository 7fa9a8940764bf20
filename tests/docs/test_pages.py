"""All pages: lines a reader takes in at once, links that lead somewhere, every page in the site's navigation, words."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tomllib

import pytest
import yaml

from tests.docs.pages import DOCS, ROOT

PAGES = sorted(DOCS.rglob("*.md")) + [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
_WIDEST = 120
_MOST_WORDS = 45_000
"""Of all pages together, README, CONTRIBUTING and CHANGELOG included."""
GENERATED = {"evidence/accuracy.md"}
"""Pages that the site has and the repository has not (scripts/site_hooks.py)."""
_LINK = re.compile(r"(?<!`)!?\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)


def name_of(page):
    return str(page.relative_to(ROOT))


def prose_of(page):
    """The text of a page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors_of(page):
    """The anchors that the headings of a page get, as mkdocs and GitHub name them."""
    anchors = set()
    for heading in re.findall(r"(?m)^#+ (.*)$", prose_of(page)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchors.add(re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return anchors


def broken_links(page):
    broken = []
    for target in _LINK.findall(re.sub(r"`[^`]*`", "", prose_of(page))):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if there.is_relative_to(DOCS) and str(there.relative_to(DOCS)) in GENERATED:
            continue
        if not there.is_file() or (anchor and there.suffix == ".md" and anchor not in anchors_of(there)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_are_short_except_in_tables_and_blocks(page):
    long = [line for line in prose_of(page).splitlines() if len(line) > _WIDEST and not line.lstrip().startswith("|")]

    assert long == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    assert broken_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_page_names_a_machine(page):
    assert not re.search(r"(?<![\w.])/(home|work|tmp|root)/\w", page.read_text(encoding="utf-8"))


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n## How it is\n\n[a](#how-it-is) [b](#elsewhere) [c](missing.md) `[d](no.md)`\n")

    assert broken_links(page) == ["#elsewhere", "missing.md"]


def nav_pages(entries):
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if isinstance(value, list):
            yield from nav_pages(value)
        else:
            yield value


def test_navigation_has_every_page_once():
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

    listed = sorted(nav_pages(settings["nav"]))

    assert listed == sorted([*GENERATED, *(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))])


def test_words_of_all_pages_stay_few():
    counts = {name_of(page): len(page.read_text(encoding="utf-8").split()) for page in PAGES}

    longest = sorted(counts, key=counts.__getitem__)[-8:]
    assert sum(counts.values()) <= _MOST_WORDS, {name: counts[name] for name in longest}


def packages():
    rows = tomllib.loads((DOCS / "packages.toml").read_text(encoding="utf-8"))
    return [name for name in rows if (ROOT / "src" / "traincast" / name).is_dir()]


def test_every_package_has_its_page_and_no_page_is_left_over():
    pages = {page.stem for page in (DOCS / "how-it-works").rglob("*.md")}

    assert pages == {"index", *packages()}


@pytest.mark.parametrize("package", packages())
def test_a_page_of_a_package_says_where_things_are(package):
    text = (DOCS / "how-it-works" / f"{package}.md").read_text(encoding="utf-8")
    where = text.partition("## Where\n")[2].partition("\n## ")[0]
    named = [name for row in where.splitlines() for name in re.findall(r"`([^`<]+)`", "".join(row.split("|")[1:2]))]

    assert named
    assert [name for name in named if not (ROOT / "src" / "traincast" / package / name).exists()] == []


def test_files_to_open_are_there():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("## Which file to open\n")[2]
    named = re.findall(r"(?m)^\|[^|]+\| `([^`]+)` \|$", table)

    assert len(named) >= 30
    assert [path for path in named if not (ROOT / "src" / "traincast" / path).exists()] == []


def test_the_page_of_every_case_says_how_to_make_it_where_there_are_no_measurements():
    hooks = runpy.run_path(str(ROOT / "scripts" / "site_hooks.py"))

    assert hooks["ACCURACY"] in GENERATED
    assert "TRAINCAST_DATA" in hooks["accuracy_text"]("")


def test_settings_of_the_site_name_nothing_on_the_network():
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

    assert settings["strict"] is True
    assert settings["theme"]["font"] is False
    assert "extra_javascript" not in settings
    assert all((DOCS / sheet).is_file() for sheet in settings["extra_css"])


def test_glossary_is_in_alphabetical_order_and_explains_what_pages_link_to():
    terms = re.findall(r"(?m)^### (.*)$", (DOCS / "glossary.md").read_text(encoding="utf-8"))

    assert terms == sorted(terms, key=str.lower)
    assert 20 <= len(terms) == len(set(terms)) <= 30


def test_site_builds_without_a_warning_and_fetches_nothing(tmp_path, monkeypatch):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")  # an advertisement for its successor, nothing about this site
    site = tmp_path / "site"

    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = {**os.environ, "TRAINCAST_DATA": ""}  # with measurements the page of every case takes minutes
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    pages = [page.read_text(encoding="utf-8") for page in site.rglob("*.html")]
    assert len(pages) > 40
    assert not [1 for page in pages if re.search(r'<(script|link)[^>]+(src|href)="https?://', page)]


def test_pages_that_the_source_names_are_there():
    sources = [path for folder in ("src", "evaluation/src", "tests") for path in (ROOT / folder).rglob("*.py")]
    sources += (ROOT / "scripts").glob("*")
    named = {
        (path.name, page)
        for path in sources
        if path.is_file()
        for page in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text(encoding="utf-8"))
    }

    assert named
    assert [(name, page) for name, page in sorted(named) if not (ROOT / page).is_file()] == []
