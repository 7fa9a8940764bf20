"""The page of a comparison, and names of reports."""

from __future__ import annotations

from traincast.app.cli.main import main


def test_platforms_side_by_side_with_honest_bars(tmp_path):
    out = tmp_path / "c.html"

    asked = ["report", "llama3-8b", "--of", "compare", "--dtype", "fp8", "-o", str(out)]
    assert main([*asked, "--on", "h100,nothing"]) == 2
    assert not out.exists()
    assert main([*asked, "--on", "h100,b200,v100"]) == 0

    html = out.read_text()
    assert "<dt>Fastest</dt><dd><b class=answer>b200</b><span>" in html
    assert "H100.00M" in html  # the longest interval ends where its cell does
    assert "v100 has no fp8 units" in html


def test_a_report_is_html_and_a_sweep_is_json(tmp_path, capsys):
    assert main(["report", "resnet50", "--on", "v100", "-o", str(tmp_path / "r.pdf")]) == 2
    assert "ends in .html" in capsys.readouterr().err
    (tmp_path / "s.csv").write_text("a,b\n")
    assert main(["report", str(tmp_path / "s.csv"), "-o", str(tmp_path / "r.html")]) == 2
    assert "sweep.json" in capsys.readouterr().err
