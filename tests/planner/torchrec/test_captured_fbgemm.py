"""FBGEMM's ops on one GPU: what is recorded forward and backward."""

from __future__ import annotations

import pytest

from tests.planner.torchrec.conftest import NEEDS_TORCHREC

pytest.importorskip("torch")

import torch

from tests.capturing.test_cuda_choices import cuda, ops_of

pytestmark = NEEDS_TORCHREC


def test_a_gradient_passes_the_padding_of_jagged_tensors():
    import fbgemm_gpu  # noqa: F401

    def run():
        rows, ends = cuda(6, 4, grad=True), torch.tensor([0, 2, 6], device="cuda")
        torch.ops.fbgemm.jagged_to_padded_dense(rows, [ends], [4], 0.0).sum().backward()
        assert rows.grad.shape == (6, 4)

    assert [op.name for op in ops_of(run) if op.name.startswith("fbgemm::")] == [
        "fbgemm::jagged_to_padded_dense_forward",
        "fbgemm::jagged_to_padded_dense_backward",
    ]


def test_tables_without_a_fused_optimizer_get_a_gradient_as_large_as_they_are():
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen

    def run():
        tables = DenseTableBatchedEmbeddingBagsCodegen([(10, 4), (20, 4)], use_cpu=False)
        indices, offsets = torch.tensor([1, 2, 3], device="cuda"), torch.tensor([0, 1, 2, 2, 3], device="cuda")
        tables(indices, offsets).sum().backward()
        assert tables.weights.grad.shape == (120,)

    lookup, update = [op for op in ops_of(run) if "embedding" in op.name]
    assert lookup.name == "fbgemm::dense_embedding_codegen_forward_unweighted_cuda"
    assert lookup.outputs[0].spec.shape == (2, 8)
    assert update.name == "fbgemm::split_embedding_backward_codegen_dense_unweighted_exact_cuda"
    assert update.outputs[0].spec.shape == (120,)


def test_a_lookup_says_the_heights_of_its_tables_and_no_host_waits_for_them():
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    def run():
        specs = [(rows, 4, EmbeddingLocation.DEVICE, ComputeDevice.CUDA) for rows in (10, 30)]
        tables = SplitTableBatchedEmbeddingBagsCodegen(specs, feature_table_map=[0, 1, 1], device=torch.device("cuda"))
        indices, offsets = torch.tensor([1, 2, 3], device="cuda"), torch.arange(4, device="cuda")
        tables(indices, offsets).sum().backward()

    ops = ops_of(run)
    lookup = next(op for op in ops if op.name.startswith("fbgemm::split_embedding_codegen_forward"))
    assert lookup.signature.scalar("rows") == (10, 30, 30)
    assert ops[ops.index(lookup) - 1].name != "aten::_to_copy"


def test_features_with_batches_of_their_own_give_their_rows_one_after_the_other():
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    from traincast.costs.kernels.embedding.lowering.lookups import lower_tbe_forward
    from traincast.costs.kernels.registry import LoweringContext

    def run():
        specs = [(50, dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA) for dim in (4, 8)]
        tables = SplitTableBatchedEmbeddingBagsCodegen(specs, device=torch.device("cuda"))
        indices, offsets = torch.arange(12, device="cuda"), torch.arange(0, 14, 2, device="cuda")
        tables(indices, offsets, batch_size_per_feature_per_rank=[[2], [4]]).sum().backward()

    lookup = next(op for op in ops_of(run) if op.name.startswith("fbgemm::split_embedding_codegen_forward"))
    assert lookup.outputs[0].spec.shape == (2 * 4 + 4 * 8,)
    (kernel,) = lower_tbe_forward(lookup.signature, LoweringContext())
    priced = dict(zip(kernel.family.fields, kernel.values, strict=True))
    assert priced["batch"] == 3 and priced["lookups"] == 12


def test_segments_that_change_places_keep_their_lengths():
    from traincast.capturing.fbgemm import find_lengths

    values, sizes, order = torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([2, 1, 3]), torch.tensor([2, 0, 1])
    arguments = (values, sizes, torch.tensor([0, 2, 3, 6]), order, 3)
    found = find_lengths("fbgemm::keyed_jagged_index_select_dim1", arguments, {}, lambda tensor: tensor)
    assert found[0].tolist() == [4, 5, 6, 1, 2, 3] and found[1].tolist() == [3, 2, 1]


def test_rows_that_are_spread_to_samples_get_their_gradients_back():
    import fbgemm_gpu  # noqa: F401

    from traincast.costs.kernels.embedding.lowering.inputs import lower_batch_select_backward
    from traincast.costs.kernels.registry import LoweringContext

    def run():
        rows, picked = cuda(2 * 4 + 3 * 8, grad=True), torch.tensor([0, 1, 1, 0, 2, 2], device="cuda")
        sizes = {"input_num_indices": [3, 3], "input_rows": [2, 3], "input_columns": [4, 8]}
        spread = torch.ops.fbgemm.batch_index_select_dim0(inputs=rows, indices=picked, **sizes)
        assert spread.shape == (3 * 4 + 3 * 8,)
        spread.sum().backward()
        assert rows.grad.shape == rows.shape

    forward, backward = [op for op in ops_of(run) if op.name.startswith("fbgemm::")]
    assert backward.name == "fbgemm::batch_index_select_dim0_backward"
    assert backward.outputs[0].spec.shape == forward.inputs[0].spec.shape
    kinds = [call.kind for call in lower_batch_select_backward(backward.signature, LoweringContext())]
    assert kinds[-1] == "gather" and "sort" in kinds
