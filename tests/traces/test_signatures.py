"""What an op worked on, from what a trace recorded about it."""

from __future__ import annotations

import json

import pytest

from tests.traces.timelines import event, kernel, launch, linked, step
from traincast.costs.kernels.lower import lower
from traincast.costs.kernels.registry import LoweringContext
from traincast.traces.arguments import derive_outputs, infer_window, parse_arguments, split_out
from traincast.traces.signatures import SignatureReader


def recorded(dims, types, **more):
    return parse_arguments(json.dumps({"dims": dims, "types": types, **more}).encode())


def op(name, ts, dur, dims, types=None, tid=1, **args):
    types = types or ["float"] * len(dims)
    return event("cpu_op", name, ts, dur, tid, **{"Input Dims": dims, "Input type": types, **args})


def signatures(tmp_path, *events):
    """Signature of every op by name."""
    tied = linked(tmp_path, step(*events))
    reader = SignatureReader(tied)
    return {
        tied.get_name(row): reader.get_signature(row)
        for row in tied.host.tolist()
        if tied.trace.events["kind"][row] == 0
    }


def test_numbers_are_no_tensors_and_names_of_types_differ():
    found = recorded([[4, 3], [], [2]], ["c10::Half", "Scalar", "long int"])
    assert [spec.dtype for spec in found.tensors] == ["float16", "int64"]
    assert found.tensors[0].stride == (3, 1)
    assert recorded([[2]], ["Tensor(float)"]).tensors[0].dtype == "float32"


def test_a_list_without_shapes_is_said_to_be_incomplete():
    assert recorded([[], []], ["TensorList", "Scalar"]).incomplete
    listed = recorded([[[2, 3], [4, 3]], []], ["GenericList[Tensor(float),Tensor(float)]", "Int"])
    assert not listed.incomplete
    assert [spec.shape for spec in listed.tensors] == [(2, 3), (4, 3)]
    indices = recorded([[[], [7], [7]]], ["GenericList[None,Tensor(long int),Tensor(long int)]"])
    assert [spec.shape for spec in indices.tensors] == [(7,), (7,)]


@pytest.mark.parametrize(
    "details", [b"", b"null", b'{"dims":null}', b'{"dims":[[1]],"types":[]}', b"[1", b'{"dims":7}']
)
def test_what_makes_no_sense_gives_no_arguments(details):
    assert parse_arguments(details) is None


def test_negative_and_huge_sizes_are_no_tensors():
    assert recorded([[-1], [1 << 60]], ["float", "float"]).tensors == ()


def test_an_extra_tensor_is_the_one_written_into():
    a, b = recorded([[4, 4], [4]], ["float", "float"]).tensors
    assert split_out("aten::clamp_min", (a, a)) == ((a,), a)
    assert split_out("aten::mul", (a, b)) == ((a, b), None)


@pytest.mark.parametrize(
    ("name", "shapes", "backward", "result"),
    [
        ("aten::mm", [[8, 4], [4, 2]], False, (8, 2)),
        ("aten::bmm", [[5, 8, 4], [5, 4, 2]], False, (5, 8, 2)),
        ("aten::add", [[8, 1, 4], [3, 1]], False, (8, 3, 4)),
        ("aten::sum", [[8, 4]], True, (1, 4)),
        ("aten::sum", [[8, 4]], False, ()),
        ("aten::mul_", [[8, 4], [4]], False, (8, 4)),
    ],
)
def test_results_follow_from_inputs(name, shapes, backward, result):
    inputs = recorded(shapes, ["float"] * len(shapes)).tensors
    assert derive_outputs(name, inputs, backward=backward)[0].shape == result


@pytest.mark.parametrize(
    ("image", "result", "kernel", "found"),
    [(224, 112, 7, (2, 3)), (56, 28, 1, (2, 0)), (56, 56, 3, (1, 1)), (28, 14, 3, (2, 1)), (10, 99, 3, None)],
)
def test_stride_and_padding_of_a_window_follow_from_three_sizes(image, result, kernel, found):
    assert infer_window(image, result, kernel) == found


def test_a_convolution_learns_its_result_from_its_gradient(tmp_path):
    found = signatures(
        tmp_path,
        op("aten::convolution", 0, 10, [[2, 16, 56, 56], [32, 16, 3, 3]], **{"Sequence number": 5}),
        op("ConvolutionBackward0", 20, 30, [[2, 32, 28, 28]], **{"Sequence number": 5, "Fwd thread id": 1}),
        op("aten::convolution_backward", 22, 20, [[2, 32, 28, 28], [2, 16, 56, 56], [32, 16, 3, 3]]),
    )
    forward, backward = found["aten::convolution"], found["aten::convolution_backward"]
    assert forward.outputs[0].shape == (2, 32, 28, 28)
    assert forward.scalar("stride") == (2, 2)
    assert forward.scalar("padding") == (1, 1)
    assert backward.scalar("output_mask") == (True, True, False)


def test_an_image_gets_no_gradient(tmp_path):
    shapes = [[2, 64, 112, 112], [2, 3, 224, 224], [64, 3, 7, 7]]
    found = signatures(tmp_path, op("aten::convolution_backward", 0, 20, shapes))
    assert found["aten::convolution_backward"].scalar("output_mask") == (False, True, False)


def test_the_weight_of_a_linear_layer_is_read_transposed(tmp_path):
    found = signatures(
        tmp_path,
        op("aten::linear", 0, 40, [[8, 4], [2, 4], [2]]),
        op("aten::t", 2, 5, [[2, 4]]),
        op("aten::addmm", 10, 20, [[2], [8, 4], [4, 2]]),
    )
    assert [spec.stride for spec in found["aten::addmm"].inputs] == [(1,), (4, 1), (1, 4)]


def test_a_lookup_and_its_gradient_complete_each_other(tmp_path):
    dims = [[0], [6400], [0], [0, 0], [2], [2], [3], [], [], [3], [], [160], [33], [], [], []]
    types = ["float", "float", "float", "float", "int", "long", "int", "Scalar", "Scalar", "long", "Scalar", "long",
             "long", "Scalar", "", ""]  # fmt: skip
    node = "torch::autograd::CppNode<SplitLookupFunction_adagrad_Op>"
    lookup = "fbgemm::split_embedding_codegen_lookup_adagrad_function"
    found = signatures(tmp_path, op(lookup, 0, 10, dims, types), op(node, 20, 10, [[16, 64]]))
    assert found[lookup].outputs[0].shape == (16, 64)
    assert found[node].name == "fbgemm::split_embedding_backward_codegen_adagrad_unweighted_exact_cuda"
    assert found[node].tensors("indices")[0].numel == 160


def test_a_concatenation_without_shapes_is_unknown(tmp_path):
    found = signatures(tmp_path, op("aten::cat", 0, 10, [[], []], ["TensorList", "Scalar"]))
    assert found["aten::cat"] is None


@pytest.mark.parametrize(
    ("name", "dims", "values", "shape"),
    [
        ("aten::mean", [[8, 64, 32, 32]], ["", "[1]", "True", ""], (8, 1, 32, 32)),
        ("aten::sum", [[8, 64, 32]], ["", "[-1, 0]", "False", ""], (1, 64, 1)),
        ("aten::argmax", [[8, 64]], ["", "1", "False"], (8, 1)),
        ("aten::upsample_bilinear2d", [[2, 4, 16, 16]], ["", "[64, 32]", "False", ""], (2, 4, 64, 32)),
    ],
)
def test_results_follow_from_recorded_dimensions_and_sizes(tmp_path, name, dims, values, shape):
    recorded = {
        "Input Dims": [*dims, *([[]] * (len(values) - 1))], "Concrete Inputs": values,
        "Input type": ["float", "ScalarList", *(["Scalar"] * (len(values) - 2))],
    }  # fmt: skip
    tied = linked(tmp_path, step(event("cpu_op", name, 10, 30, **recorded), launch(1, 20), kernel(1, 30, 5)))
    row = next(row for row in tied.host.tolist() if tied.get_name(row) == name)
    signature = SignatureReader(tied).get_signature(row)
    assert signature is not None
    assert signature.outputs[0].shape == shape


@pytest.mark.parametrize(
    ("name", "index", "values", "shape"),
    [("aten::index_select", [3], ["", "2", ""], (1, 16, 3, 64)), ("aten::index_select", [3], None, (3, 16, 4096, 64)),
     ("aten::gather", [1, 16, 2, 64], ["", "2", ""], (1, 16, 2, 64))],
)  # fmt: skip
def test_a_few_tokens_of_a_cache_cost_what_is_taken_and_not_the_cache(tmp_path, name, index, values, shape):
    more = {"Concrete Inputs": values} if values else {}
    types = ["c10::Half", "Scalar", "long int"]
    made = signatures(tmp_path, op(name, 10, 20, [[1, 16, 4096, 64], [], index], types, **more))[name]
    assert made.outputs[0].shape == shape


def test_tokens_written_into_a_cache_cost_what_is_written(tmp_path):
    cache, new = [1, 16, 4096, 64], [1, 16, 1, 64]
    events = [op("aten::index_copy_", 10, 20, [cache, [], [1], new], ["c10::Half", "Scalar", "long int", "c10::Half"])]
    (call,) = lower(signatures(tmp_path, *events)["aten::index_copy_"], LoweringContext())
    assert call.values[call.family.fields.index("bytes_written")] == 2 * 16 * 64
