"""`traincast shard`: the page, the JSON document, exit codes and rejections."""

from __future__ import annotations

import json
import shlex

import pytest

from traincast.app.cli.main import main

TABLES = """\
tables:
  - {name: user, rows: 2000000, dim: 64, pooling: 20, access: "zipf:1.05", optimizer: rowwise_adagrad}
  - {name: item, rows: 500000, dim: 64, pooling: 5, optimizer: rowwise_adagrad}
  - {name: shop, rows: 1000, dim: 32, pooling: 1, optimizer: rowwise_adagrad}
  - {name: city, rows: 300, dim: 32, pooling: 40, optimizer: rowwise_adagrad}
"""


@pytest.fixture
def tables(tmp_path):
    path = tmp_path / "tables.yaml"
    path.write_text(TABLES)
    return path


def _run(capsys, *arguments):
    code = main(["shard", *(str(each) for each in arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def _refused(capsys, *arguments):
    code, out, err = _run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    return err


def _plan(ranks, world_size=2, **more):
    names = ("user", "item", "shop", "city")
    placed = {name: {"kind": "table_wise", "ranks": [rank]} for name, rank in zip(names, ranks, strict=True)}
    return {"world_size": world_size, "tables": placed | more}


def test_a_search_prints_a_page_and_writes_the_plan(capsys, tables, tmp_path):
    out = tmp_path / "plan.json"
    given = (tables, "--on", "dgx-a100", "--gpus", "2", "--no-torchrec")
    code, page, _ = _run(capsys, *given, "--out", out)
    assert code == 0
    assert "4 tables" in page and "on 2 x NVIDIA A100" in page
    for name in ("search", "greedy by size", "greedy by lookups", "greedy by rows", "user", "item", "shop", "city"):
        assert name in page
    # the plan that was written ranks first when it is given back
    code, text, _ = _run(capsys, *given[:-1], "--candidates", out, "--json")
    result = json.loads(text)
    assert code == 0
    assert result["plan"] == json.loads(out.read_text())


def test_several_platforms_are_compared_fastest_first(capsys, tables):
    given = (tables, "--on", "dgx-a100,dgx-h100", "--gpus", "2", "--no-torchrec", "--time-limit", "0")
    code, page, _ = _run(capsys, *given)
    assert code == 0 and "embedding part only" in page
    assert [word for word in page.split() if word.startswith("dgx-")] == ["dgx-h100", "dgx-a100"]
    _, text, _ = _run(capsys, *given, "--json")
    found = json.loads(text)["platforms"]
    assert found[0]["platform"] == "dgx-h100" and found[0]["iteration_ms"] <= found[1]["iteration_ms"]
    assert "for one platform" in _refused(capsys, *given, "--out", tables.parent / "plan.json")


def test_the_document_says_what_the_page_says(capsys, tables):
    code, text, _ = _run(capsys, tables, "--on", "dgx-a100", "--gpus", "2", "--no-torchrec", "--json", "--seed", "3")
    result = json.loads(text)
    assert code == 0
    assert result["fits"] and result["missing_gb"] == 0
    assert len(result["ranks"]) == 2
    assert set(result["plan"]["tables"]) == {"user", "item", "shop", "city"}
    compared = {each["name"]: each for each in result["compared"]}
    assert all(each["iteration_ms"] >= result["iteration_ms"] for each in compared.values())
    assert compared["search"]["slower_percent"] == 0
    for rank in result["ranks"]:
        assert rank["memory_gb"]["device"] > 0
        assert rank["ms"]["lookup"] >= 0


def test_candidates_are_only_ranked(capsys, tables, tmp_path):
    file = tmp_path / "plans.json"
    file.write_text(json.dumps({"plans": {"heaped": _plan((0, 0, 0, 0)), "spread": _plan((0, 1, 1, 1))}}))
    code, text, _ = _run(capsys, tables, "--on", "dgx-a100", "--gpus", "2", "--candidates", file, "--json",
                         "--batch-size", "8192")  # fmt: skip
    result = json.loads(text)
    assert code == 0
    assert [each["name"] for each in result["compared"]] == ["spread", "heaped"]
    assert "rank 0" in result["compared"][1]["why"]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (_plan((0, 0, 0, 0), world_size=4), "the plan is for 4 ranks, not 2"),
        (_plan((0, 0, 0, 5)), "table 'city': table_wise on rank 5"),
        (_plan((0, 0, 0, 0), more={"kind": "table_wise", "ranks": [0]}), "places table 'more'"),
        ({"world_size": 2, "tables": {"user": {"kind": "row_wise", "ranks": [0, 1]}}}, "does not place table 'item'"),
    ],
)
def test_a_plan_for_something_else_is_refused_by_name(capsys, tables, tmp_path, plan, message):
    file = tmp_path / "other.json"
    file.write_text(json.dumps(plan))
    assert message in _refused(capsys, tables, "--on", "dgx-a100", "--gpus", "2", "--candidates", file)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{name: bad, rows: 10, dim: 0}", "table 'bad': dim 0"),
        ("{name: bad, rows: 10, dim: 8, pooling: -1}", "table 'bad': pooling -1"),
        ("{name: city, rows: 10, dim: 8}", "table 'city' appears 2 times"),
        ("{name: bad, rows: 9000000000, dim: 128}", "table 'bad' needs 4,608.0 GB"),
    ],
)
def test_wrong_tables_are_refused_by_name(capsys, tmp_path, entry, message):
    path = tmp_path / "tables.yaml"
    path.write_text(f"{TABLES}  - {entry}\n")
    assert message in _refused(capsys, path, "--on", "dgx-a100", "--gpus", "2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", "0"), "--gpus 0"),
        (("--gpus", "12"), "--gpus 12 does not fill nodes of 8"),
        (("--gpus", "2", "--batch-size", "0"), "--batch-size 0"),
        (("--gpus", "2", "--seed", "-1"), "--seed -1"),
        (("--gpus", "2", "--time-limit", "-1"), "--time-limit -1"),
        (("--gpus", "2", "--time-limit", "nan"), "--time-limit nan"),
        (("--gpus", "2", "--candidates", "nowhere.json"), "nowhere.json: cannot be read"),
        (("--gpus", "2", "--dense", "nowhere.yaml"), "nowhere.yaml: cannot be read"),
    ],
)
def test_wrong_arguments_are_refused(capsys, tables, arguments, message):
    assert message in _refused(capsys, tables, "--on", "dgx-a100", *arguments)


def test_an_unknown_set_names_those_there_are(capsys):
    assert "mlperf-dlrm" in _refused(capsys, "mlperf-dlmr", "--on", "dgx-a100", "--gpus", "2")


def test_what_does_not_fit_is_an_answer_with_exit_code_one(capsys, tmp_path):
    path = tmp_path / "tables.csv"
    path.write_text("name,rows,dim\n" + "".join(f"t{i},300000000,128\n" for i in range(5)))
    code, text, _ = _run(capsys, path, "--on", "dgx-a100", "--gpus", "4", "--no-torchrec", "--json",
                         "--time-limit", "1")  # fmt: skip
    result = json.loads(text)
    assert code == 1
    assert not result["fits"]
    assert result["missing_gb"] > 1


def test_a_dense_part_takes_part_in_the_step(capsys, tables, tmp_path):
    dense = tmp_path / "dense.yaml"
    dense.write_text("bottom_mlp: [13, 512, 64]\ntop_mlp: [1024, 1024, 1]\ninteraction: cat\n")
    times = []
    for more in ((), ("--dense", dense)):
        _, text, _ = _run(capsys, tables, "--on", "dgx-a100", "--gpus", "2", "--no-torchrec", "--json", *more)
        times.append(json.loads(text)["iteration_ms"])
    assert times[1] > 1.5 * times[0]
    dense.write_text("bottom_mlp: [13]\ntop_mlp: 3\n")
    assert "field 'top_mlp' must be a list" in _refused(
        capsys, tables, "--on", "dgx-a100", "--gpus", "2", "--dense", dense
    )


def test_links_that_a_device_alone_does_not_state_are_said(tables, capsys):
    given = (tables, "--no-torchrec", "--time-limit", 0, "--json")
    _, out, _ = _run(capsys, *given, "--on", "a100-80gb", "--gpus", 2)
    (note,) = json.loads(out)["notes"]
    assert note.startswith("a100-80gb is one GPU; several are taken to be joined as in ")
    for platform, gpus in (("dgx-a100", 2), ("a100-80gb", 1)):
        _, out, _ = _run(capsys, *given, "--on", platform, "--gpus", gpus)
        assert json.loads(out)["notes"] == []


def test_every_plan_has_the_command_that_predicts_it(capsys, tmp_path):
    # given a search over two tables, without and with a dense part
    tables, dense = tmp_path / "tables.yaml", tmp_path / "dense.yaml"
    tables.write_text("tables:\n  - {name: user, rows: 2000000, dim: 64}\n  - {name: item, rows: 500000, dim: 64}\n")
    dense.write_text("bottom_mlp: [13, 64]\ntop_mlp: [64, 1]\n")
    words = ["shard", str(tables), "--on", "dgx-a100", "--gpus", "2", "--batch-size", "256", "--no-torchrec", "--json"]
    for more, part in (([], "embedding"), (["--dense", str(dense)], "step")):
        assert main([*words, *more]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["part"] == part

        # when the commands of some plans are run, then each gives its time to the last digit
        for row in told["compared"][:3]:
            _, *line = shlex.split(row["command"])
            assert main([*line, "--json"]) == 0
            document = json.loads(capsys.readouterr().out)
            assert document["iteration_ms"] == row["iteration_ms"] == row["prediction"]["iteration_ms"]
            assert document["memory_gb"] == row["prediction"]["memory_gb"]


def test_a_part_of_a_step_is_not_called_a_step(capsys, tmp_path):
    tables = tmp_path / "tables.yaml"
    tables.write_text("tables:\n  - {name: user, rows: 2000, dim: 64}\n  - {name: item, rows: 5000, dim: 64}\n")
    assert main(["shard", str(tables), "--on", "dgx-a100", "--gpus", "2", "--no-torchrec"]) == 0
    text = capsys.readouterr().out
    assert "for the embedding part only" in text and "per step" not in text and "--dense" in text
