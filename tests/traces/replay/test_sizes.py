"""What a traced step is: samples and tokens, training or inference, and what of it has sizes."""

from __future__ import annotations

import json

import pytest

from tests.traces.timelines import event, kernel, launch, op, step
from traincast.app.api import load_trace, predict
from traincast.app.cli.main import main

ATTENTION = "aten::_scaled_dot_product_flash_attention"


def traced(tmp_path, *events):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": step(*events)}))
    return path


def launched(number, name, dims, length=30, kernel_name="gemm"):
    """An op of tensors of these shapes with one kernel."""
    at = 40 * number
    return [op(name, at, 30, dims), launch(number, at + 5), kernel(number, at + 12, length, name=kernel_name)]


def product(number, rows):
    return launched(number, "aten::mm", [[rows, 64], [64, 64]])


def test_tokens_are_divided_among_samples_as_attention_has_them(tmp_path):
    attention = launched(2, ATTENTION, [[4, 8, 128, 64]] * 3, kernel_name="flash_fwd_kernel")

    workload = load_trace(traced(tmp_path, *product(1, 512), *attention))

    assert (workload.batch_size, workload.seq_len) == (4, 128)


def test_tokens_are_divided_among_samples_as_a_lookup_has_them(tmp_path):
    lookup = launched(2, "aten::embedding", [[1000, 64], [4, 128]], kernel_name="indexSelectLargeIndex")

    workload = load_trace(traced(tmp_path, *lookup, *product(1, 512)))

    assert (workload.batch_size, workload.seq_len) == (4, 128)


def test_tokens_in_one_long_row_are_no_batch(tmp_path):
    cached = launched(2, "_C_cache_ops::reshape_and_cache_flash", [[300, 8, 64]] * 2, kernel_name="reshape_and_cache")

    workload = load_trace(traced(tmp_path, *product(1, 300), *cached))

    assert (workload.batch_size, workload.seq_len) == (1, 300)
    assert "does not say of how many samples" in workload.meta["notes"]


def test_rows_of_a_product_are_samples_where_there_are_no_tokens(tmp_path):
    workload = load_trace(traced(tmp_path, *product(1, 512)))

    assert (workload.batch_size, workload.seq_len) == (512, 0)


def test_a_step_without_gradients_is_inference(tmp_path):
    assert load_trace(traced(tmp_path, *product(1, 8))).mode == "inference"


@pytest.mark.parametrize("name", ["MmBackward0", "Optimizer.step#SGD.step", "CompiledFunctionBackward"])
def test_a_step_with_gradients_or_an_optimizer_is_training(tmp_path, name):
    path = traced(tmp_path, *product(1, 8), event("cpu_op", name, 200, 20))

    assert load_trace(path).mode == "training"


def test_the_share_of_kernel_time_without_sizes_is_said_first_and_with_the_prediction(tmp_path, capsys):
    bare = [event("cpu_op", "aten::cat", 100, 20), launch(9, 105), kernel(9, 112, 270, name="CatArrayBatchedCopy")]
    path, out = traced(tmp_path, *product(1, 8), *bare), tmp_path / "w.tc"

    assert main(["trace", str(path), "--workload-out", str(out)]) == 0

    text = capsys.readouterr().out
    assert "inference, batch 8, 1 programs, 1 ranks\n  covers: 10% of the kernel time: the other 90% (0.27 ms)" in text
    assert any("covers 10% of the kernel time" in warning for warning in predict(out, on="v100").warnings)


def test_nothing_is_said_where_all_kernels_have_sizes(tmp_path):
    workload = load_trace(traced(tmp_path, *product(1, 8)))

    assert "covers" not in workload.meta
    assert not any("covers" in warning for warning in predict(workload, on="v100").warnings)
