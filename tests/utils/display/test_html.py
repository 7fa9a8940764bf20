"""Exact rendered HTML."""

from __future__ import annotations

from traincast.utils.display.html import format_html_details, format_html_lines, format_html_table


def test_table_aligns_the_columns_named():
    assert format_html_table(("name", "ms"), [("gemm", "1.5")], right=(1,)) == (
        '<table><thead><tr><th>name</th><th style="text-align:right">ms</th></tr></thead>'
        '<tbody><tr><td>gemm</td><td style="text-align:right">1.5</td></tr></tbody></table>'
    )


def test_table_without_rows_is_its_header():
    assert format_html_table(("a",), []) == "<table><thead><tr><th>a</th></tr></thead><tbody></tbody></table>"


def test_whatever_comes_in_is_escaped():
    made = (
        format_html_table(("<i>",), [('<script src="x">&',)])
        + format_html_lines("<b>\n&")
        + format_html_details("<u>", "")
    )

    assert "<td>&lt;script src=&quot;x&quot;&gt;&amp;</td>" in made
    assert "<th>&lt;i&gt;</th>" in made
    assert "<p>&lt;b&gt;<br>&amp;</p>" in made
    assert "<summary>&lt;u&gt;</summary>" in made


def test_folded_content_is_html_already():
    assert format_html_details("rows", "<table></table>") == "<details><summary>rows</summary><table></table></details>"
