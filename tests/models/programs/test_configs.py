"""What a DLRM is in numbers: widths, parameters, memory, and what is rejected."""

from __future__ import annotations

from dataclasses import replace

import pytest

from traincast.models.dlrm.config import DLRM_DDP, DLRM_DEFAULT, DLRM_MLPERF, DLRM_V2, STUDY_DLRMS, DlrmConfig
from traincast.models.sharded_dlrm.dense import DcnDense, Dense
from traincast.utils.errors import TraincastError

SMALL = DlrmConfig(
    name="small",
    bottom_mlp=(3, 8),
    top_mlp=(4, 1),
    rows_per_table=(10, 20),
    embedding_dim=8,
    lookups_per_table=(1, 5),
)


def test_dot_products_are_pairs_after_the_bottom_output():
    assert SMALL.top_input == 8 + 3  # three vectors, three pairs
    assert DLRM_MLPERF.top_input == 128 + 27 * 26 // 2


def test_concatenation_is_as_wide_as_everything():
    assert replace(SMALL, interaction="cat").top_input == 8 + 2 * 8


def test_parameters_count_every_row():
    mlps = (3 * 8 + 8) + (11 * 4 + 4) + (4 * 1 + 1)
    assert SMALL.parameters == mlps + 30 * 8


def test_cross_layers_are_two_thin_products_and_a_bias():
    width = DLRM_V2.top_input
    assert width == 27 * 128
    without = DlrmConfig.parameters.fget(DLRM_V2)
    assert DLRM_V2.parameters - without == 3 * (2 * width * 512 + width)


def test_resident_rows_are_capped_and_true_heights_stay():
    capped = replace(SMALL, resident_rows=15)
    assert capped.table_rows == (10, 15)
    assert capped.rows_per_table == (10, 20)
    assert replace(SMALL, resident_rows=0).table_rows == (10, 20)


def test_lookups_are_summed_over_tables():
    assert (SMALL.lookups, SMALL.num_tables) == (6, 2)


def test_another_operator_and_optimizer_leave_the_rest():
    changed = SMALL.replace_options(embedding="fbgemm", optimizer="adam")
    assert replace(changed, embedding=SMALL.embedding, optimizer=SMALL.optimizer) == SMALL


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embedding_dim": 16}, "bottom_mlp ends at 8 but embedding_dim is 16"),
        ({"lookups_per_table": (1,)}, "lookups_per_table has 1 entries for 2 tables"),
        ({"access": ("uniform",)}, "access has 1 entries for 2 tables"),
    ],
)
def test_what_does_not_fit_together_is_refused(change, message):
    with pytest.raises(TraincastError, match=message):
        replace(SMALL, **change)


def test_concatenation_allows_other_widths():
    assert replace(SMALL, interaction="cat", embedding_dim=16).top_input == 8 + 2 * 16


def test_the_studies_models_have_their_published_sizes():
    assert list(STUDY_DLRMS) == ["dlrm-default", "dlrm-mlperf", "dlrm-ddp"]
    assert DLRM_DEFAULT.lookups == 800
    assert sum(DLRM_MLPERF.rows_per_table) == 187_767_399
    assert DLRM_DDP.parameters == 82_710_913


def test_the_dense_part_is_the_model_without_its_tables():
    dense = Dense.from_dlrm(replace(SMALL, loss="mse", optimizer="adam"))
    assert dense == Dense(bottom_mlp=(3, 8), top_mlp=(4, 1), loss="mse", optimizer="adam", index_dtype="int32")
    assert dense.compute_top_width(2 * 8) == SMALL.top_input
    assert dense.equal_widths
    assert not replace(dense, interaction="cat").equal_widths


def test_the_dense_part_of_a_cross_network_keeps_it():
    dense = Dense.from_dlrm(DLRM_V2)
    assert isinstance(dense, DcnDense)
    assert (dense.cross_layers, dense.cross_rank, dense.equal_widths) == (3, 512, True)


def test_dot_products_need_embeddings_of_the_bottom_width():
    with pytest.raises(TraincastError, match="20 columns are no multiple"):
        Dense.from_dlrm(SMALL).compute_top_width(20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bottom_mlp": (3,)}, "at least two widths"),
        ({"top_mlp": ()}, "at least two widths"),
        ({"interaction": "sum"}, "unknown interaction 'sum'"),
        ({"loss": "mae"}, "unknown loss 'mae'"),
        ({"optimizer": "lamb"}, "unknown optimizer 'lamb'"),
        ({"half": "float8"}, "unknown half 'float8'"),
    ],
)
def test_dense_parts_that_cannot_be_are_refused(change, message):
    with pytest.raises(TraincastError, match=message):
        replace(Dense.from_dlrm(SMALL), **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"interaction": "dot"}, "interaction 'cat' and loss 'bce'"),
        ({"loss": "mse"}, "interaction 'cat' and loss 'bce'"),
        ({"cross_layers": 0}, "cross_layers and cross_rank must be 1 or more"),
        ({"cross_rank": 0}, "cross_layers and cross_rank must be 1 or more"),
    ],
)
def test_cross_networks_that_cannot_be_are_refused(change, message):
    with pytest.raises(TraincastError, match=message):
        replace(Dense.from_dlrm(DLRM_V2), **change)


def test_memory_is_weights_gradients_buckets_state_and_activations():
    # Given 97 parameters and activations that are less than what the optimizer makes
    dense = Dense.from_dlrm(SMALL)
    parameters = (3 * 8 + 8) + (11 * 4 + 4) + (4 * 1 + 1)
    kept = 3 + 8 + 11 + 4 + 1

    assert dense.compute_memory_bytes(16, 1) == 4 * (3 * parameters + 2 * kept)
    # Adam keeps two numbers per weight; at this size its step makes more than there are activations
    assert replace(dense, optimizer="adam").compute_memory_bytes(16, 1) == 4 * (
        5 * parameters + max(2 * kept, parameters)
    )


def test_memory_grows_with_the_batch_and_the_optimizer():
    dense = Dense.from_dlrm(DLRM_V2)
    columns = 26 * 128
    sizes = [
        replace(dense, optimizer=optimizer).compute_memory_bytes(columns, 64)
        for optimizer in ("sgd", "adagrad", "adam")
    ]
    assert sizes == sorted(sizes)
    assert dense.compute_memory_bytes(columns, 128) > dense.compute_memory_bytes(columns, 64)
