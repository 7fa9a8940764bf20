"""Table configs as JSON: round trips, and rejection of what cannot be represented."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.torchrec.conftest import refusal
from traincast.models.embeddings import Pooling, Reuse, Table, Uniform, Zipf, load_tables
from traincast.planner.torchrec.tables import load_tables_json, tables_from_json, tables_to_json
from traincast.utils.errors import TraincastError

CONFIG = {"name": "user", "num_embeddings": 1000, "embedding_dim": 64}


def test_a_bare_list_of_configs():
    read = tables_from_json([{**CONFIG, "feature_names": ["u"], "pooling": "MEAN", "data_type": "FP16"}])

    assert read.tables == (Table(name="user", rows=1000, dim=64, pooling=Pooling.from_constant(1.0), dtype="fp16"),)
    assert read.modules == {"user": "embedding_bag_collection"}


def test_modules_keep_their_paths_and_weights():
    content = {
        "modules": {
            "sparse.ebc": {"tables": [CONFIG]},
            "sparse.weighted": {"is_weighted": True, "tables": [{**CONFIG, "name": "item", "pooling_factors": [7.5]}]},
        }
    }

    read = tables_from_json(content)

    assert read.modules == {"user": "sparse.ebc", "item": "sparse.weighted"}
    assert [table.weighted for table in read.tables] == [False, True]
    assert read.tables[1].pooling.mean == 7.5


def test_what_torchrec_does_not_know_is_read_from_our_fields():
    extra = {"pooling": {"lengths": [1, 9], "shares": [0.5, 0.5]}, "access": "zipf:1.2", "optimizer": "adam"}

    (table,) = tables_from_json([{**CONFIG, "traincast": extra}]).tables

    assert (table.pooling.mean, table.access, table.optimizer) == (5.0, Zipf(1.2), "adam")


def test_enums_may_carry_their_class_and_null_fields_are_ignored():
    entry = {**CONFIG, "pooling": "PoolingType.SUM", "data_type": "DataType.FP32", "init_fn": None, "need_pos": False}

    assert tables_from_json([entry]).tables[0].dtype == "fp32"


def test_a_set_survives_being_written_and_read(tables):
    written = json.loads(json.dumps(tables_to_json(tables)))

    read = tables_from_json(written)

    assert sorted(read.tables, key=lambda table: table.name) == list(tables)
    assert read.modules["t3"] == "weighted_embedding_bag_collection"


def test_measured_histograms_survive():
    tables = load_tables("dlrm-2021-856")[:3]
    assert isinstance(tables[0].access, Reuse)

    assert tables_from_json(json.loads(json.dumps(tables_to_json(tables)))).tables == tables


def test_weighted_and_other_tables_cannot_share_a_module(tables):
    with pytest.raises(TraincastError, match="'t3' and others of module 'all' differ in weighted lookups"):
        tables_to_json(tables, {table.name: "all" for table in tables})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"name": ""}, "a table has no name"),
        ({"name": ["a"]}, "table 1: name ['a']"),
        ({"num_embeddings": 0}, "table 'user': rows 0; give a number from 1"),
        ({"num_embeddings": 1e3 + 0.5}, "table 'user': rows 1000.5; give an integer"),
        ({"embedding_dim": 0}, "table 'user': dim 0"),
        ({"embedding_dim": 10**40}, "table 'user': dim 1000"),
        ({"data_type": "INT8"}, "table 'user': unknown dtype 'int8'"),
        ({"data_type": 16}, "table 'user': unknown dtype '16'"),
        ({"pooling": "MAX"}, "table 'user': pooling 'MAX'"),
        ({"feature_names": "u"}, "table 'user': feature_names 'u'"),
        ({"feature_names": ["a", "b"]}, "table 'user': feature_names ['a', 'b']; give the one"),
        ({"pooling_factors": [-1.0]}, "table 'user': pooling -1"),
        ({"pooling_factors": [1.0, 2.0]}, "table 'user': pooling [1.0, 2.0]"),
        ({"pooling_factors": [3], "traincast": {"pooling": 3}}, "another field both say its pooling"),
        ({"pooling": "NONE", "pooling_factors": [20.0]}, "table 'user': pooling NONE"),
        ({"use_virtual_table": True}, "table 'user': use_virtual_table True"),
        ({"total_num_buckets": 8}, "table 'user': total_num_buckets 8"),
        ({"rows": 5}, "both say its rows"),
        ({"traincast": {"rows": 5}}, "both say its rows"),
        ({"traincast": {"access": "pareto"}}, "table 'user': access 'pareto'"),
        ({"traincast": {"optimizer": "lion"}}, "unknown optimizer 'lion'"),
    ],
)
def test_a_wrong_field_is_refused_by_name(change, complaint):
    with pytest.raises(TraincastError) as raised:
        tables_from_json([{**CONFIG, **change}])

    assert complaint in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ([], "no tables"),
        ([CONFIG, CONFIG], "table 'user' appears 2 times"),
        ([5], "table 1: give a mapping"),
        ({"tables": []}, "give `modules`"),
        ({"modules": []}, "modules \\[\\]"),
        ({"modules": {"a": {"tables": {}}}}, "module 'a'; give its `tables`"),
        ({"modules": {"a": {"is_weighted": 5, "tables": [CONFIG]}}}, "weighted 5"),
        ([{"name": "user", "embedding_dim": 4}], "table 'user': no rows"),
    ],
)
def test_something_else_is_refused(content, complaint):
    with pytest.raises(TraincastError, match=complaint):
        tables_from_json(content)


def test_a_file_is_named_in_the_complaint(tmp_path):
    file = tmp_path / "model.json"
    file.write_text(json.dumps([{**CONFIG, "embedding_dim": 0}]))

    with pytest.raises(TraincastError, match=r"model\.json: table 'user': dim 0"):
        load_tables_json(file)
    file.write_text(json.dumps([CONFIG]))
    assert load_tables_json(file).tables[0].access == Uniform()


SCRAPS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FULL = {
    **CONFIG, "feature_names": ["u"], "pooling": "SUM", "data_type": "FP32", "weight_init_max": 0.1, "need_pos": False,
    "traincast": {"pooling": 3, "access": "zipf:1.1", "optimizer": "sgd"},
}  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(field=st.sampled_from([*FULL, "pooling_factors", "use_virtual_table", ""]), scrap=SCRAPS)
def test_any_field_is_read_or_refused_but_never_a_traceback(field, scrap):
    assert "\n" not in refusal(lambda: tables_from_json([{**FULL, field: scrap}] if field else scrap))


@settings(max_examples=200, deadline=None)
@given(field=st.sampled_from(["pooling", "access", "optimizer"]), scrap=SCRAPS)
def test_our_own_fields_too(field, scrap):
    ours = {**FULL["traincast"], field: scrap}

    assert "\n" not in refusal(lambda: tables_from_json([{**FULL, "traincast": ours}]))
