"""DLRMs from YAML: what is accepted, and what each mistake says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from traincast.ir import Phase
from traincast.models.embeddings.access import Reuse, parse_access
from traincast.simulator.scenario.dlrm_file import load_dlrm_yaml, parse_dlrm, read_dlrm
from traincast.utils.errors import TraincastError

GOOD = """
bottom_mlp: [13, 512, 64]
top_mlp: [512, 1]
num_tables: 4
rows_per_table: 1000
embedding_dim: 64
lookups_per_table: 3
"""


def test_one_number_stands_for_every_table() -> None:
    config = parse_dlrm(GOOD)

    assert config.rows_per_table == (1000,) * 4
    assert config.lookups_per_table == (3,) * 4
    assert (config.embedding, config.optimizer, config.loss, config.index_dtype) == ("batched", "sgd", "bce", "int32")


def test_lists_give_the_number_of_tables() -> None:
    config = parse_dlrm(
        "bottom_mlp: [4, 8]\ntop_mlp: [1]\nrows_per_table: [10, 20]\nembedding_dim: 8\nlookups_per_table: [1, 2]\n"
    )

    assert config.num_tables == 2
    assert config.top_input == 3 + 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("embeding: bag", "unknown field 'embeding'. Did you mean embedding"),
        ("loss: mae", "Field 'loss' takes mse, bce"),
        ("embedding_dim: 0", "field 'embedding_dim' takes integers from 1"),
        ("embedding_dim: true", "field 'embedding_dim' takes integers"),
        ("embedding_dim: 32", "bottom_mlp ends at 64 but embedding_dim is 32"),
        ("top_mlp: [512, 2]", "field 'top_mlp' must end in 1"),
        ("bottom_mlp: 13", "field 'bottom_mlp' must be a list"),
        ("bottom_mlp: [13, -2]", "field 'bottom_mlp' takes integers"),
        ("lookups_per_table: [1, 2]", "number of tables is not clear"),
        ("num_tables: 100000000", "field 'num_tables' takes integers from 1 to 10000"),
        ("rows_per_table: 99999999999999", "field 'rows_per_table' takes integers"),
        ("batch_size: 1.5", "field 'batch_size' takes integers"),
        ("name: [a]", "field 'name' must be text"),
        ("optimizer: {}", "Field 'optimizer' takes"),
        ("a: [", "not valid YAML at line"),
    ],
)
def test_a_mistake_names_its_field(change: str, message: str) -> None:
    field = change.partition(":")[0] + ":"
    kept = [line for line in GOOD.splitlines() if not line.startswith(field)]
    with pytest.raises(TraincastError) as refusal:
        parse_dlrm("\n".join([*kept, change, ""]))

    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("field", ["bottom_mlp", "top_mlp", "rows_per_table", "embedding_dim", "lookups_per_table"])
def test_a_missing_field_is_named(field: str) -> None:
    text = "\n".join(line for line in GOOD.splitlines() if not line.startswith(field))

    with pytest.raises(TraincastError, match=f"field '{field}' is missing"):
        parse_dlrm(text)


@pytest.mark.parametrize("text", ["", "[1, 2]", "just words", "!!python/object:os.system {}", "a: &x [*x]"])
def test_what_is_no_description_is_refused(text: str) -> None:
    with pytest.raises(TraincastError):
        parse_dlrm(text)


def test_tables_larger_than_64_bits_are_refused() -> None:
    text = GOOD.replace("num_tables: 4", "num_tables: 10000").replace("1000\n", "17179869184\n")

    with pytest.raises(TraincastError, match="larger than any memory"):
        parse_dlrm(text.replace("[13, 512, 64]", "[13, 65536]").replace("dim: 64", "dim: 65536"))


def test_a_file_gives_a_workload(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD + "batch_size: 100\n")

    workload = load_dlrm_yaml(file)

    assert (workload.name, workload.batch_size, workload.mode) == ("mine", 100, "training")
    assert workload.resized(batch_size=7).batch_size == 7


def test_options_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD)

    without = load_dlrm_yaml(file, optimizer="none")
    fbgemm = load_dlrm_yaml(file, embedding="fbgemm", optimizer="adagrad")

    assert Phase.OPTIMIZER not in {scope.phase for scope in without.programs[0].scopes}
    assert any("adagrad_unweighted_exact" in op.name for op in fbgemm.programs[0].ops)
    with pytest.raises(TraincastError, match="fp32 or tf32, not bf16"):
        load_dlrm_yaml(file, precision="bf16")
    with pytest.raises(TraincastError, match="unknown optimizer 'lamb'"):
        load_dlrm_yaml(file, optimizer="lamb")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "long.yaml").write_text("#" * (2 << 20))

    for name in ("absent.yaml", "binary.yaml", "long.yaml"):
        with pytest.raises(TraincastError, match=name):
            read_dlrm(tmp_path / name)


def _lookups(text: str, tmp_path: Path):
    path = tmp_path / "model.yaml"
    path.write_text(text, encoding="utf-8")
    (program,) = load_dlrm_yaml(path).programs
    return [op.signature for op in program.ops if "embedding" in op.name]


def test_access_is_what_every_lookup_and_update_says(tmp_path: Path) -> None:
    forward, backward = _lookups(GOOD + 'access: "zipf:1.05"\n', tmp_path)

    assert forward.scalar("access") == backward.scalar("access") == ("zipf:1.05",) * 4
    assert forward.scalar("pooling") == (3,) * 4
    assert parse_dlrm(GOOD + "access: [uniform, zipf:1, zipf:0.5, uniform]\n").access[1] == "zipf:1.0"


def test_tables_with_different_poolings_say_so_and_even_ones_need_not(tmp_path: Path) -> None:
    uneven = GOOD.replace("lookups_per_table: 3", "lookups_per_table: [1, 2, 3, 6]")

    assert _lookups(GOOD, tmp_path)[0].scalar("access") is None
    assert _lookups(uneven, tmp_path)[0].scalar("pooling") == (1, 2, 3, 6)


def test_access_may_come_from_raw_indices_beside_the_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "raw.npz", indices=np.arange(60) % 7, lengths=np.full(20, 3))

    forward, _ = _lookups(GOOD + "access: {indices: raw.npz}\n", tmp_path)

    access = parse_access(forward.scalar("access")[0])
    assert isinstance(access, Reuse)
    assert (access.histogram.lookups, access.histogram.unique_rows) == (60, 7)


@pytest.mark.parametrize(
    ("access", "message"),
    [
        ("zipf", "table 0: access 'zipf'"),
        ("[uniform, zipf:1]", "'access' has 2 entries for 4 tables"),
        ("[uniform, uniform, 'zipf:-1', uniform]", "table 2: Zipf exponent -1"),
        ("{indices: none.npz}", "table 0: access: no file"),
        ("3", "table 0: access 3"),
    ],
)
def test_wrong_access_is_refused_by_table(access: str, message: str) -> None:
    with pytest.raises(TraincastError, match=message):
        parse_dlrm(GOOD + f"access: {access}\n")
