from __future__ import annotations

from tests.costs.kernels.signatures import field, kernels, lowered, tensor
from traincast.costs.kernels.streaming.lowering.reduction import split_launches

_CHUNK = 65536


def test_launches_hold_at_most_320_chunks():
    found = list(split_launches([1000 * _CHUNK], depth=2))
    assert [launch.elements // _CHUNK for launch in found] == [320, 320, 320, 40]
    assert all(launch.tensors == 1 for launch in found)


def test_launches_hold_as_many_tensors_as_the_depth_allows():
    assert [launch.tensors for launch in split_launches([10] * 250, depth=1)] == [110, 110, 30]
    assert [launch.tensors for launch in split_launches([10] * 100, depth=4)] == [36, 36, 28]


def test_no_element_is_lost():
    sizes = [1, 70_000, 3 * _CHUNK, 0, 21_000_000, 5]
    assert sum(launch.elements for launch in split_launches(sizes, depth=3)) == sum(sizes)


def test_foreach_add_in_place_moves_all_lists():
    lists = [tensor(1024, 1024), tensor(1024)]
    (call,) = lowered("aten::_foreach_add_", {"self": lists, "other": lists})
    total = 4 * (1024 * 1024 + 1024)
    assert (call.kind, field(call, "bytes_read"), field(call, "bytes_written")) == ("add", 2 * total, total)
    assert field(call, "tensors") == 4


def test_foreach_zero_reads_nothing():
    (call,) = lowered("aten::_foreach_zero_", {"self": [tensor(1024)]})
    assert (call.kind, field(call, "bytes_read"), field(call, "bytes_written")) == ("fill", 0, 4096)


def test_foreach_goes_tensor_by_tensor_where_types_differ():
    inputs = {"self": [tensor(64), tensor(64)], "other": [tensor(64, dtype="float16"), tensor(64)]}
    assert kernels(lowered("aten::_foreach_add_", inputs)) == ["elementwise:add", "elementwise:add"]


def test_foreach_on_host_steps_launches_nothing():
    assert lowered("aten::_foreach_add_", {"self": [tensor(device="cpu"), tensor(device="cpu")]}) == ()


def test_fused_adam_reads_four_lists_and_writes_three():
    parameters = [tensor(1000, 100), tensor(100)]
    steps = [tensor(), tensor()]
    lists = {"self": parameters, "grads": parameters, "exp_avgs": parameters, "exp_avg_sqs": parameters}
    (call,) = lowered("aten::_fused_adam_", {**lists, "state_steps": steps})
    total = 4 * 100_100
    assert (call.kind, field(call, "bytes_read"), field(call, "bytes_written")) == ("optimizer", 4 * total, 3 * total)


def test_fused_sgd_without_momentum_writes_parameters_only():
    parameters = [tensor(1000)]
    (call,) = lowered("aten::_fused_sgd_", {"self": parameters, "grads": parameters})
    assert (field(call, "bytes_read"), field(call, "bytes_written")) == (8000, 4000)


def test_gradient_unscaling():
    grads = [tensor(1000), tensor(1000)]
    (call,) = lowered(
        "aten::_amp_foreach_non_finite_check_and_unscale_",
        {"self": grads, "found_inf": tensor(1), "inv_scale": tensor(1)},
    )
    assert (field(call, "bytes_read"), field(call, "bytes_written")) == (8000, 8000)
