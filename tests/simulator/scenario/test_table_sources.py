"""Where the tables of a search may come from, and what is said of those that say little."""

from traincast.simulator.scenario.kinds import find_source_kind
from traincast.simulator.scenario.tables import load_recommender

DLRM = """
bottom_mlp: [13, 64, 16]
top_mlp: [32, 1]
rows_per_table: [1000, 50]
embedding_dim: 16
lookups_per_table: [1, 3]
"""


def test_a_described_dlrm_brings_its_dense_part(tmp_path):
    (tmp_path / "dlrm.yaml").write_text(DLRM)
    tables, dense, notes = load_recommender(str(tmp_path / "dlrm.yaml"))
    assert [(table.name, table.rows, table.pooling.mean) for table in tables] == [
        ("table0", 1000, 1.0),
        ("table1", 50, 3.0),
    ]
    assert dense is not None and dense.bottom_mlp == (13, 64, 16)
    assert notes == []


def test_sizes_alone_are_tables_of_an_assumed_width(tmp_path):
    (tmp_path / "sizes.json").write_text('{"user_id": 40000000}')
    tables, dense, notes = load_recommender(str(tmp_path / "sizes.json"))
    assert (tables[0].dim, dense) == (128, None)
    assert "128 columns" in notes[0]
    assert find_source_kind(str(tmp_path / "sizes.json")) == "tables"


def test_a_hugging_face_configuration_is_no_set_of_tables(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}')
    assert find_source_kind(str(tmp_path / "config.json")) == "transformer"
