"""Tables damaged in every way: a row that cannot be predicted is left out with its reason, a table that cannot be read
is one line and exit code 2; never a traceback."""

from __future__ import annotations

import json
import random
import shutil

import pytest

from tests.evaluation.suites.folders import CNN, DLE, DLRM, EMBEDDINGS, FOUR_GPUS, MLPERF, TRANSFORMER, write_rows
from traincast.app.cli.main import main
from traincast.utils.errors import TraincastError
from traincast.utils.metrics import ErrorRow
from traincast_evaluation import measured_tables as tables
from traincast_evaluation.commands import evaluate as verb
from traincast_evaluation.fitting import collectives_data
from traincast_evaluation.kernels.attention.measurements import read_attention
from traincast_evaluation.kernels.gemm.measurements import read_gemm
from traincast_evaluation.suites import multi_gpu
from traincast_evaluation.suites.default_program import GROUP
from traincast_evaluation.suites.registry import SUITES, Evaluation

polars = pytest.importorskip("polars")

TABLES = {
    "dlrm": {"dlrm_single_gpu": DLRM},
    "cnn": {"cnn_single_gpu": CNN},
    "transformers": {"transformers_single_gpu": TRANSFORMER},
    "distributed-embeddings": {"distributed_embeddings": EMBEDDINGS},
    "multi-gpu": {"transformers_4gpu": FOUR_GPUS, "dle_dlrm": DLE, "mlperf_dlrm": MLPERF},
}
"""The tables of every suite of steps, each with a sound row."""
NUMBERS = {"batch", "global_batch", "seq_len", "num_gpus", "iteration_ms", "e2e_ms", "gpu_active_ms_implied"}
FREE_TEXT = {"readme_date", "submitter", "mlperf_round"}  # only shown
ABSURD = ("", "x", "0", "-1", "nan", "inf", "1e300", "1e15", "1.5e-9", "9" * 5000, "2\x1b[31m", "None", "four")
DAMAGED = [(suite, table, column) for suite, tables in TABLES.items() for table in tables for column in tables[table]]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(multi_gpu, "summarise_replayed_ranks", lambda suite, data: [])

    def write(suite, *further, table=""):
        for name, row in TABLES[suite].items():
            write_rows(tmp_path, name, row, *(further if name == table else ()))
        return tmp_path

    return write


def evaluated(capsys, suite, data, *more):
    code = main(["evaluate", suite, "--data", str(data), "--json", *more])
    out, err = capsys.readouterr()
    assert code in (0, 2), err
    if code == 2:
        assert (out, len(err.splitlines())) == ("", 1)
        assert err.strip().isprintable()
        return err
    return json.loads(out)


@pytest.mark.parametrize(("suite", "table", "column"), DAMAGED)
def test_a_row_that_cannot_be_predicted_stops_nothing(folder, capsys, suite, table, column):
    sound = len(TABLES[suite])
    rows = [{**TABLES[suite][table], column: text} for text in ABSURD]
    result = evaluated(capsys, suite, folder(suite, *rows, table=table))

    cases = [case for case in result["cases"] if case["device"] != GROUP]  # which stand alongside rows
    assert len(cases) == sound + len(rows)
    left_out = [case for case in cases if case.get("reason")]
    assert all(case["reason"].isprintable() and len(case["reason"]) < 1000 for case in left_out)
    assert all(case["predicted_ms"] > 0 for case in cases if case not in left_out)
    if column in NUMBERS:
        assert len(left_out) >= len(rows) - 2, "1e15 and 1.5e-9 are times, if not of a step"
    assert all(case["case"].isprintable() for case in cases)


@pytest.mark.parametrize(("suite", "table", "column"), DAMAGED)
def test_a_missing_column_is_one_line(folder, capsys, suite, table, column):
    data = folder(suite)
    row = {name: text for name, text in TABLES[suite][table].items() if name != column}
    assert f"'{column}'" in evaluated(capsys, suite, write_rows(data, table, row))


@pytest.mark.parametrize("content", ["", "\n", "a\n", "a,b\n1\n", "a,a\n1,2\n", "\x00\n", '"', None])
@pytest.mark.parametrize("suite", TABLES)
def test_a_table_that_is_none_is_one_line(folder, capsys, suite, content):
    data = folder(suite)
    for table in TABLES[suite]:
        path = data / "iterations" / f"{table}.csv"
        whole = path.read_text(encoding="utf-8")
        path.unlink()
        if content is not None:
            path.write_text(content, encoding="utf-8")
        assert table in evaluated(capsys, suite, data)
        path.write_text(whole.splitlines()[0] + "\n", encoding="utf-8")
        assert "has no rows" in evaluated(capsys, suite, data)
        path.write_text(whole + whole.splitlines()[1].rpartition(",")[0] + "\n", encoding="utf-8")
        assert "line 3 has" in evaluated(capsys, suite, data)
        path.write_bytes(b"\xff\xfe\x00")
        assert "not UTF-8" in evaluated(capsys, suite, data)
        path.write_text(whole, encoding="utf-8")


def test_when_no_row_can_be_predicted_there_is_no_answer(folder, capsys):
    data = write_rows(folder("dlrm"), "dlrm_single_gpu", {**DLRM, "device": "TPU"})
    refusal = evaluated(capsys, "dlrm", data, "--max-mape", "1000")
    assert "none of 1 rows can be predicted" in refusal
    assert "TPU" in refusal


def test_rows_left_out_stand_in_the_text(folder, capsys):
    data = folder("dlrm", {**DLRM, "device": "TPU"}, table="dlrm_single_gpu")
    assert main(["evaluate", "dlrm", "--data", str(data)]) == 0
    assert "left out: dlrm_single_gpu.csv, row 2: unknown" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"accelerator": "Google TPU v4"}, "unknown accelerator 'Google TPU v4'"),
        ({"accelerator": "NVIDIA A100-SXM4-60GB"}, "unknown accelerator"),
        ({"benchmark": "bert"}, "unknown benchmark 'bert'"),
        ({"benchmark": "dlrm_dcnv2"}, "round v0.7 had no benchmark 'dlrm_dcnv2'"),
        ({"mlperf_round": "v9.9"}, "unknown mlperf_round 'v9.9'"),
        ({"framework": "JAX"}, "unknown framework 'JAX'"),
        ({"num_nodes": "2"}, "2 nodes of 8 GPUs are not 8 GPUs"),
    ],
)
def test_no_row_is_priced_on_hardware_or_as_a_program_that_it_does_not_name(folder, capsys, changes, reason):
    data = folder("multi-gpu", {**MLPERF, **changes}, table="mlperf_dlrm")
    cases = [case for case in evaluated(capsys, "multi-gpu", data)["cases"] if case["device"] != GROUP]
    (case,) = [case for case in cases if case["reason"]]
    assert reason in case["reason"]


@pytest.mark.parametrize("suite", ["dlrm", "cnn", "distributed-embeddings"])
def test_published_tables_keep_their_sound_rows(shared_data, tmp_path, capsys, suite):
    (table,) = TABLES[suite]
    (tmp_path / "iterations").mkdir()
    path = tmp_path / "iterations" / f"{table}.csv"
    shutil.copy(shared_data / "iterations" / path.name, path)
    header, first, second, *rest = path.read_text(encoding="utf-8").splitlines()
    place = header.split(",").index("model")
    cells = first.split(",")
    cells[place] = "nobody's"
    path.write_text("\n".join([header, ",".join(cells), second, *rest[:1]]) + "\n", encoding="utf-8")
    result = evaluated(capsys, suite, tmp_path)
    assert [bool(case["reason"]) for case in result["cases"]] == [False, False, True]


@pytest.mark.parametrize("suite", SUITES)
def test_a_folder_without_measurements_is_one_line(tmp_path, capsys, suite):
    assert isinstance(evaluated(capsys, suite, tmp_path), str)


@pytest.mark.parametrize(
    ("suite", "missing"), [("kernels", "no row of the tables is of"), ("collectives", "the tables have no all_reduce")]
)
@pytest.mark.parametrize("rows", [1, 40])
def test_tables_of_a_few_rows_are_one_line_that_says_what_is_missing(
    shared_data, monkeypatch, capsys, suite, missing, rows
):
    whole = tables._read_frame
    monkeypatch.setattr(tables, "_read_frame", lambda data, file: whole(data, file).head(rows))
    assert missing in evaluated(capsys, suite, shared_data)


READERS = {
    "kernels/gemm_fp32": lambda data: read_gemm(data, "gemm_fp32"),
    "kernels/gemm_mixed": lambda data: read_gemm(data, "gemm_mixed"),
    "kernels/attention_mixed": read_attention,
    "collectives/nccl_h100_multinode": collectives_data.read_cluster_points,
    "collectives/vidur_send_recv": collectives_data.read_send_recv_points,
}


@pytest.mark.parametrize("table", READERS)
def test_an_odd_cell_of_a_table_is_named_by_row_and_column(shared_data, monkeypatch, table):
    """One cell of a seeded row becomes odd, column after column: it does not matter, or the message has its place."""
    whole = tables._read_frame
    frame = whole(shared_data, f"{table}.parquet").gather_every(41).head(120)
    rng = random.Random(table)
    named = 0
    for column in frame.columns:
        for odd in (None, "", "x", "-1", "0", "inf", "1e300"):
            row = rng.randrange(frame.height)
            changed = with_cell(frame, column, row, odd)
            monkeypatch.setattr(
                tables, "_read_frame", lambda data, file, one=changed: one if table in file else whole(data, file)
            )
            said = refusal_of(READERS[table], shared_data)
            if f"row {row}" in said:
                assert f"column '{column}'" in said or "faster than" in said
                named += 1
    assert named > len(frame.columns)


def refusal_of(reader, data):
    try:
        reader(data)
    except TraincastError as error:
        return str(error)
    return ""


def with_cell(frame, column, row, value):
    cells = frame[column].cast(polars.String).to_list()
    cells[row] = value
    series = polars.Series(column, cells, dtype=polars.String)
    try:
        return frame.with_columns(series.cast(frame[column].dtype))
    except polars.exceptions.PolarsError:  # such a value makes the column one of text
        return frame.with_columns(series)


@pytest.mark.parametrize("suite", ["kernels", "collectives"])
def test_a_parquet_file_that_is_none_is_one_line(tmp_path, capsys, suite):
    for file in ("kernels/gemm_fp32", "collectives/nccl_single_node"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / f"{file}.parquet").write_bytes(b"PAR1 and nothing else")
    assert "no Parquet file" in evaluated(capsys, suite, tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("value", "worth", "no column 'value'"),
        (",0.1", ",nan", "is not a number from 0"),
        (",0.1", ",x", "is not a number from 0"),
        (",0.1", ",7", "do not add up to 1"),
        ("batch_size", "size", "has no batch_size"),
        ("summary", "other", "has no batch"),
        ("accesses_by_reuse", "accesses", "reuse bins"),
        ("_0,", "_x,", "reuse bins"),
        ("avg_num_indices,", "avg_num_indices,1e300", "is not a number from 0"),
        ("avg_num_indices,", "avg_num_indices", "cells"),
    ],
)
def test_damaged_shares_of_reuse_are_one_line(shared_data, tmp_path, capsys, old, new, reason):
    (tmp_path / "embedding_access").mkdir()
    for year in ("2021", "2022"):
        name = f"embedding_access/locality_{year}.csv"
        whole = (shared_data / name).read_text(encoding="utf-8")
        assert old in whole
        once = 1 if old == "_0," else -1
        (tmp_path / name).write_text(whole.replace(old, new, once), encoding="utf-8")
    assert reason in evaluated(capsys, "embedding-access", tmp_path)


def test_a_mean_error_that_is_no_number_fails_the_check(monkeypatch, tmp_path, capsys):
    nan = float("nan")
    row = ErrorRow("dlrm", "all: step", 1, nan, nan, nan, nan, "", nan)
    monkeypatch.setattr(verb, "evaluate", lambda *args, **options: Evaluation(suite="dlrm", summary=(row,)))
    assert main(["evaluate", "dlrm", "--data", str(tmp_path), "--max-mape", "5"]) == 1


@pytest.mark.parametrize("limit", ["nan", "inf", "-1"])
def test_a_limit_that_limits_nothing_is_refused(folder, capsys, limit):
    assert "--max-mape" in evaluated(capsys, "dlrm", folder("dlrm"), "--max-mape", limit)
