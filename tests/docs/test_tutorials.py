"""Every tutorial is carried out as it stands, in an empty folder, and prints what it shows."""

from __future__ import annotations

import re
import runpy

import pytest

from tests.docs.pages import DOCS, ROOT, Block, Command, blocks_of, commands_of, matches, run_page

TUTORIALS = sorted(path for path in (DOCS / "tutorial").glob("*.md") if path.name != "index.md")
NEEDS = {"your-own-model": ("torch",)}


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_tutorial_runs_and_prints_what_it_shows(page, tmp_path):
    for module in NEEDS.get(page.stem, ()):
        pytest.importorskip(module)

    assert run_page(page, tmp_path) > 0


def test_every_tutorial_is_linked_from_the_first_page():
    index = (DOCS / "tutorial" / "index.md").read_text(encoding="utf-8")

    assert sorted(re.findall(r"^\d\. .*?\((\S+\.md)\)", index, re.MULTILINE)) == [page.name for page in TUTORIALS]
    assert "Nine short lessons" in index and len(TUTORIALS) == 9


def test_lessons_have_one_order_everywhere():
    index = (DOCS / "tutorial" / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\d\. .*?\((\S+\.md)\)", index, re.MULTILINE)

    menu = re.findall(r"tutorial/(\S+\.md)", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = {name: (DOCS / "tutorial" / name).read_text(encoding="utf-8") for name in listed}
    following = [re.findall(r"Next:\s\[[^\]]*\]\((\S+\.md)\)", pages[name]) for name in listed]
    assert menu == ["index.md", *listed]
    assert following == [*([name] for name in listed[1:]), []]


def test_example_trace_is_what_its_script_writes():
    script = runpy.run_path(str(ROOT / "scripts" / "make_tutorial_trace.py"))

    shipped = (DOCS / "tutorial" / "example-trace.json").read_text(encoding="utf-8")
    assert shipped == script["trace_text"]()


def test_blocks_have_language_title_and_body():
    text = 'words\n```python title="a.py"\nx = 1\n```\nmore\n```console\n$ ls\n```\n'

    assert blocks_of(text) == [Block("python", "a.py", "x = 1\n"), Block("console", "", "$ ls\n")]


def test_commands_have_their_output_and_join_continued_lines():
    body = "$ one --a \\\n    --b\nfirst\nsecond\n\n$ two\n"

    assert commands_of(body) == [Command("one --a --b", "first\nsecond"), Command("two", "")]


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a b", "a b  \n", True),
        ("a b", "a c\n", False),
        ("took ... s", "took 2.7 s\n", True),
        ("took ... s", "took 2.7 ms or\nmore s\n", False),
        ("a\n...\nz", "a\nb\nc\nz\n", True),
        ("a\n...\nz", "a\nz\n", True),
        ("a\n...\nz", "a\nb\n", False),
        ("a", "a\nb\n", False),
        ("1.5 (x)", "1x5 (x)\n", False),
    ],
)
def test_shown_output_matches_but_for_what_dots_stand_for(shown, printed, same):
    assert matches(shown, printed) is same
