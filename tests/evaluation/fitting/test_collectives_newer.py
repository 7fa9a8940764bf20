"""Newer machines: tables read, groups of an NVLink domain, and servers that no fit has seen."""

from __future__ import annotations

import numpy as np
import pytest

from traincast.costs.collectives.model import load_shipped_collectives
from traincast.utils.errors import TraincastError
from traincast_evaluation.fitting import collectives_newer as newer
from traincast_evaluation.fitting.collectives import read_points
from traincast_evaluation.suites.collectives_clusters import evaluate_clusters
from traincast_evaluation.suites.collectives_newer import (
    evaluate_links_of_newer,
    evaluate_nvlink_domains,
    evaluate_other_release,
    evaluate_other_servers,
)

polars = pytest.importorskip("polars")


@pytest.fixture(scope="module")
def points(shared_data):
    return read_points(shared_data)


def blackwell_table(folder, **changed):
    columns = {
        "system": ["gb200", "gb200"], "nccl_version": ["2.29.2", "1.3.0rc10"], "collective": ["alltoall", "all_reduce"],
        "dtype": ["half", "int8"], "num_gpus": [4, 2], "message_elements": [1024, 1024], "latency_us": [10.0, 11.0],
    } | changed  # fmt: skip
    path = folder / newer.BLACKWELL
    path.parent.mkdir(parents=True)
    polars.DataFrame(columns).write_parquet(path)
    return folder


def test_elements_become_bytes_and_only_reductions_keep_their_type(tmp_path):
    table = newer.read_blackwell_points(blackwell_table(tmp_path))
    assert list(table.bytes) == [2048.0, 1024.0]
    assert list(table.kind) == ["all_to_all", "all_reduce"]
    assert list(table.dtype) == ["any", "int"]
    assert list(table.set) == ["gb200@2.29.2", "gb200@1.3.0rc10"]
    np.testing.assert_allclose(table.seconds, [10e-6, 11e-6])
    assert list(newer.select_nccl_points(table).set) == ["gb200@2.29.2"]


@pytest.mark.parametrize(
    ("column", "value", "word"),
    [("dtype", "float128", "float128"), ("system", "gb900", "gb900"), ("latency_us", 0.0, "latency_us")],
)
def test_a_row_that_nobody_understands_is_named(tmp_path, column, value, word):
    old = {"dtype": "half", "system": "gb200", "latency_us": 11.0}[column]
    folder = blackwell_table(tmp_path, **{column: [old, value]})
    with pytest.raises(TraincastError, match=rf"nccl_blackwell.parquet', row 1, column '{column}'.*{word}|{word}"):
        newer.read_blackwell_points(folder)


def test_curves_come_from_whole_domains_and_never_from_one_tray(points):
    domain = points.take(points.set == "gb200-nvl72")
    assert domain.ranks.min() == 8
    assert domain.ranks.max() == 72
    assert not any("xla" in str(name) for name in points.set)


def test_groups_of_a_domain_follow_from_the_others(points):
    rows = evaluate_nvlink_domains(points, load_shipped_collectives())
    assert len(rows) == 24  # two domains, four collectives, three group sizes
    reductions = [row for row in rows if "all_to_all" not in row.group]
    assert max(row.gmae for row in reductions) <= 12
    assert max(row.gmae for row in rows) <= 20


def test_another_release_of_the_software_is_within_a_few_percent(shared_data):
    rows = evaluate_other_release(shared_data, load_shipped_collectives())
    assert [row.n for row in rows] == [378] * 4
    assert max(row.gmae for row in rows) <= 3


def test_servers_nobody_fitted(shared_data):
    rows = {row.group: row for row in evaluate_other_servers(shared_data, load_shipped_collectives())}
    assert rows["another machine: dgx-a100 send_recv, above 64 KiB"].gmae <= 3
    assert rows["another machine: pcie-rtx-pro-6000 all_reduce, above 64 KiB"].gmae <= 8
    # another chip, from NVIDIA's figure of its NVLink alone
    assert rows["another machine: h20 all_reduce, above 64 KiB"].gmae <= 10


def test_cards_without_peer_access_follow_from_their_number(shared_data, points):
    rows = {row.group: row for row in evaluate_links_of_newer(shared_data, points, load_shipped_collectives())}
    for ranks in (2, 4, 8):
        assert rows[f"links only: l40s without peer access, {ranks} GPUs, above 64 KiB"].gmae <= 20


def test_a_cluster_with_infiniband_is_predicted_from_its_description(shared_data):
    rows = {row.group: row for row in evaluate_clusters(shared_data, load_shipped_collectives())}

    large = [row for group, row in rows.items() if "Sophia" in group and "above" in group]
    assert len(large) == 3 and all(row.n >= 40 and row.mape < 16 for row in large)
    polaris = rows["clusters left out but for one number: ALCF Polaris all_to_all, above 64 KiB"]  # too fast, known
    assert polaris.n >= 150 and polaris.gmae < 30 and polaris.bias == pytest.approx(-16, abs=4)
    assert "at least 13.8" in polaris.reference, "what no single answer to its settings can be below"
