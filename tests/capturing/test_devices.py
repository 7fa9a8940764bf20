"""What is put on `cuda`, what stays on the host, copies, streams, events and stubs."""

from __future__ import annotations

import contextlib
import inspect
import threading

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from traincast.capturing import capture_step, devices
from traincast.capturing.cuda_module import PretendedGpu, pretend_gpu
from traincast.ir import Phase, Program
from traincast.utils.errors import TraincastError


def captured(make_step, **options) -> Program:
    options.setdefault("rebatch", False)
    return capture_step(make_step, batch_size=8, name="x", **options).programs[0]


def ops(program, name):
    return [op for op in program.ops if op.name == name]


def test_copies_to_and_from_the_device():
    # Given a step that copies pageable and pinned inputs in and the loss out
    def make_step(batch):
        model = nn.Linear(4, 4).to("cuda")
        pageable, pinned = torch.randn(batch, 4), torch.randn(batch, 4).pin_memory()

        def step():
            loss = model(pageable.to("cuda") + pinned.cuda(non_blocking=True)).sum()
            return loss.cpu(), loss.detach().to("cpu", non_blocking=True), loss.item()

        return step

    # When it is captured
    program = captured(make_step)
    copies = ops(program, "aten::_to_copy")

    # Then each copy says from where to where and whether the host waits
    ends = [(c.inputs[0].spec.device, c.outputs[0].spec.device, c.signature.scalar("non_blocking")) for c in copies]
    assert ends == [("cpu", "cuda", False), ("cpu:pinned", "cuda", True), ("cuda", "cpu", False), ("cuda", "cpu", True)]
    assert [c.phase for c in copies[:2]] == [Phase.INPUT, Phase.INPUT]
    (item,) = ops(program, "aten::_local_scalar_dense")
    assert item.inputs[0].spec.device == "cuda"
    assert {s.name for s in program.scopes if s.num_ops and program.ops[s.first_op] in copies} == {"aten::to"}


def test_host_memory_takes_no_device_memory():
    def make_step(batch):
        host = torch.zeros(1000, batch)
        return lambda: host.to("cuda").sum()

    program = captured(make_step)
    assert program.storage_nbytes[ops(program, "aten::_to_copy")[0].inputs[0].storage] == 0
    assert program.storage_nbytes[ops(program, "aten::_to_copy")[0].outputs[0].storage] == 32000


def test_tensors_say_they_are_on_cuda():
    def make_step(batch):
        x = torch.ones(batch, device="cuda")
        seen = (str(x.device), x.is_cuda, x.is_cpu, x.get_device(), str(torch.ones(2).device))
        assert seen == ("cuda:0", True, False, 0, "cpu")
        assert x.new_zeros(2).is_cuda
        assert torch.zeros_like(x, device="cpu").is_cpu
        assert torch.tensor([1, 2], device="cuda").is_cuda
        return lambda: x + 1

    captured(make_step)


@pytest.mark.parametrize("place", ["argument", "context", "default", "nowhere", "module", "method"])
def test_all_ways_to_put_a_model_on_the_device(place):
    def make_step(batch):
        if place == "argument":
            model, x = nn.Linear(4, 4, device="cuda"), torch.randn(batch, 4, device=torch.device("cuda", 0))
        elif place == "context":
            with torch.device("cuda"):
                model, x = nn.Linear(4, 4), torch.randn(batch, 4)
        elif place == "default":
            torch.set_default_device("cuda")
            model, x = nn.Linear(4, 4), torch.randn(batch, 4)
        elif place == "nowhere":
            model, x = nn.Linear(4, 4), torch.randn(batch, 4)
        elif place == "module":
            model, x = nn.Linear(4, 4).to("cuda"), torch.randn(batch, 4).to("cuda")
        else:
            model, x = nn.Linear(4, 4).cuda(), torch.randn(batch, 4).cuda(0)
        return lambda: model(x).sum().backward()

    program = captured(make_step)
    assert {t.spec.device for op in program.ops for t in (*op.inputs, *op.outputs)} == {"cuda"}
    assert torch.get_default_device().type == "cpu"


def test_small_host_tensors_keep_their_values():
    def make_step(batch):
        rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        assert rates == pytest.approx([0, 0.1, 0.2, 0.3])
        assert torch.arange(5).tolist() == [0, 1, 2, 3, 4]
        return lambda: torch.ones(batch, device="cuda") * rates[1]

    captured(make_step)


def test_tables_larger_than_this_machine_need_no_memory():
    def make_step(batch):
        table = nn.EmbeddingBag(1_000_000_000, 128, mode="sum").cuda()
        indices = torch.zeros(batch, 1, dtype=torch.long, device="cuda")
        return lambda: table(indices)

    assert captured(make_step).storage_nbytes.max() == 512_000_000_000


@pytest.mark.parametrize("move", [lambda m: m.to("cuda"), lambda m: m.cuda(), lambda m: m.to_empty(device="cuda")])
def test_tied_weights_stay_tied(move):
    def make_step(batch):
        embed, head = nn.Embedding(1000, 32), nn.Linear(32, 1000, bias=False)
        head.weight = embed.weight
        model = move(nn.Sequential(embed, head))
        assert model[0].weight is model[1].weight
        tokens = torch.zeros(batch, dtype=torch.long, device="cuda")
        return lambda: model(tokens).sum().backward()

    program = captured(make_step)
    (lookup,), (transposed, *_) = ops(program, "aten::embedding"), ops(program, "aten::t")
    assert lookup.inputs[0].storage == transposed.inputs[0].storage
    assert [s.name for s in program.scopes].count("torch::autograd::AccumulateGrad") == 1


def test_tied_weights_of_a_model_built_before_stay_tied():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight

    def make_step(batch):
        model.cuda()
        assert model[0].weight is model[1].weight
        return lambda: model(torch.zeros(batch, dtype=torch.long, device="cuda"))

    captured(make_step)


def test_streams_events_and_synchronisation():
    # Given a step that copies on one stream, computes on another and waits in every way
    def make_step(batch):
        model, host, side = nn.Linear(4, 4).cuda(), torch.randn(batch, 4).pin_memory(), torch.cuda.Stream()

        def step():
            with torch.cuda.stream(side):
                x = host.to("cuda", non_blocking=True)
                done = side.record_event()
            torch.cuda.current_stream().wait_event(done)
            x.record_stream(torch.cuda.current_stream())
            model(x).sum()
            done.synchronize()
            side.synchronize()
            torch.cuda.synchronize()

        return step

    # When it is captured
    program = captured(make_step)
    control = [(op.name, dict(op.signature.scalars)) for op in program.ops if op.name.startswith("cuda::")]

    # Then the synchronisation is recorded in order, and ops know their stream
    event = control[0][1]["event"]
    assert control == [
        ("cuda::event_record", {"event": event, "stream": 1}),
        ("cuda::stream_wait_event", {"event": event, "stream": 0}),
        ("cuda::event_synchronize", {"event": event}),
        ("cuda::stream_synchronize", {"stream": 1}),
        ("cuda::device_synchronize", {}),
    ]
    assert [op.stream for op in program.ops if op.name in ("aten::_to_copy", "aten::addmm")] == [1, 0]


def test_backward_runs_on_the_streams_of_forward_and_waits_between_them():
    # Given two layers on two streams
    def make_step(batch):
        first, second, side = nn.Linear(4, 4).cuda(), nn.Linear(4, 4).cuda(), torch.cuda.Stream()
        x = torch.randn(batch, 4, device="cuda")

        def step():
            with torch.cuda.stream(side):
                hidden = first(x)
            torch.cuda.current_stream().wait_stream(side)
            second(hidden).sum().backward()

        return step

    # When it is captured
    program = captured(make_step)
    backward = [
        op for op in program.ops if op.phase == Phase.BACKWARD and op.name in ("aten::mm", "cuda::stream_wait_event")
    ]

    # Then the first layer's backward waits for the second's, and runs where its forward ran
    assert [(op.name, op.stream) for op in backward][:4] == [
        ("aten::mm", 0), ("aten::mm", 0), ("cuda::stream_wait_event", 1), ("aten::mm", 1),
    ]  # fmt: skip


def test_questions_scripts_ask_are_answered():
    def make_step(batch):
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 1
        assert torch.cuda.current_device() == 0
        assert torch.cuda.is_bf16_supported()
        assert torch.cuda.get_device_properties(0).total_memory > 0
        assert torch.cuda.get_device_capability() >= (7, 0)
        assert torch.cuda.max_memory_allocated() == 0
        torch.cuda.set_device(0)
        torch.cuda.manual_seed_all(1)
        torch.cuda.empty_cache()
        generator = torch.Generator(device="cuda").manual_seed(3)
        with torch.cuda.device(0), torch.cuda.nvtx.range("x"):
            x = torch.randn(batch, device="cuda", generator=generator)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        assert start.elapsed_time(end) == 0.0
        return lambda: x + 1

    captured(make_step)


def test_a_custom_op_is_recorded_under_its_own_name():
    # Given an op of one's own with a fake implementation and a gradient
    @torch.library.custom_op("traincasttest::scale", mutates_args=())
    def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    scale.register_fake(lambda x, factor: torch.empty_like(x))
    scale.register_autograd(
        lambda ctx, grad: (scale(grad, ctx.factor), None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
    )

    # When a step that uses it is captured
    def make_step(batch):
        x = torch.randn(batch, 4, device="cuda", requires_grad=True)
        return lambda: scale(x, 2.0).sum().backward()

    program = captured(make_step)

    # Then it is there, forward and backward, with its arguments
    forward, backward = ops(program, "traincasttest::scale")
    assert forward.signature.scalar("factor") == 2.0
    assert backward.phase == Phase.BACKWARD


def test_sparse_gradients_are_index_and_value_tensors():
    def make_step(batch):
        table = nn.EmbeddingBag(1000, 16, sparse=True, mode="sum").cuda()
        optimizer = torch.optim.SparseAdam(table.parameters())
        indices = torch.zeros(batch, 3, dtype=torch.long, device="cuda")

        def step():
            optimizer.zero_grad()
            table(indices).sum().backward()
            optimizer.step()

        return step

    program = captured(make_step, rebatch=True)
    assert program.rigid == ""
    (backward,) = ops(program, "aten::_embedding_bag_backward")
    assert [t.spec.shape for t in backward.outputs] == [(1, 24), (24, 16)]
    (unique,) = ops(program, "aten::_coalesce")
    assert [t.spec.shape for t in unique.outputs] == [(1, 24), (24, 16)]
    update = ops(program, "aten::add_")[-1]
    assert update.signature.scalar("other_layout") == "sparse_coo"
    assert update.signature.groups == (("self", 1), ("other", 2))


def test_inference_mode_is_taken_apart_as_elsewhere():
    def make_step(batch):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval().cuda()
        x = torch.randn(batch, 3, 8, 8, device="cuda")
        return torch.inference_mode()(lambda: model(x))

    program = captured(make_step, mode="inference")
    assert [(s.name, program.ops[s.first_op].name) for s in program.scopes] == [
        ("aten::conv2d", "aten::convolution"),
        ("aten::batch_norm", "aten::cudnn_batch_norm"),
    ]


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_recomputes_in_backward(reentrant):
    from torch.utils.checkpoint import checkpoint

    def make_step(batch):
        layer = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.1)).cuda()
        x = torch.randn(batch, 16, device="cuda", requires_grad=True)
        return lambda: checkpoint(layer, x, use_reentrant=reentrant).sum().backward()

    products = ops(captured(make_step), "aten::addmm")
    assert [op.phase for op in products] == [Phase.FORWARD, Phase.BACKWARD]


def _state():
    names = ("is_available", "Stream", "Event", "synchronize", "current_stream", "device", "_lazy_init")
    return (
        [getattr(torch.cuda, name) for name in names],
        nn.Parameter.__new__, nn.Module._apply, torch.autograd.backward, torch.Generator, torch.compile,
        torch.clear_autocast_cache, torch.Tensor.register_hook, torch.set_default_device,
        torch.autograd.profiler.record_function.__enter__, torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(), torch.is_autocast_enabled("privateuseone"),
        len(nn.modules.module._global_forward_hooks), str(torch.get_default_device()),
    )  # fmt: skip


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back(fails):
    # Given the state of PyTorch before
    before = _state()
    grad_fn = type(nn.functional.dropout(torch.ones(2, requires_grad=True), 0.5).grad_fn)

    # When a step is captured, or fails half-way
    def make_step(batch):
        model = nn.Linear(4, 4).cuda()

        def step():
            model(torch.ones(batch, 4, device="cuda")).sum().backward()
            if fails:
                raise KeyError("oops")

        return step

    if fails:
        with pytest.raises(TraincastError, match="oops"):
            captured(make_step)
    else:
        captured(make_step)

    # Then PyTorch is as it was
    assert _state() == before
    assert type(nn.functional.dropout(torch.ones(2, requires_grad=True), 0.5).grad_fn) is grad_fn
    assert inspect.isfunction(nn.Parameter.__new__)
    assert torch.ones(2).device.type == "cpu"


def _capture(make_step, **how):
    return capture_step(make_step, batch_size=512, name="x", rebatch=False, **how)


@pytest.mark.parametrize("length", [100, 20_000])
def test_a_large_table_of_the_host_is_looked_up_there(length):
    """More than 64 MiB of indices have no data here, and stay on the host all the same."""

    def make_step(batch):
        table, index = nn.EmbeddingBag(1000, 8, mode="sum"), torch.randint(1000, (batch, length))
        return lambda: table(index).cuda().sum().backward()

    looked_up = [op.signature for op in _capture(make_step).programs[0].ops if "embedding_bag" in op.name]
    assert len(looked_up) == 2
    assert all(spec.device == "cpu" for s in looked_up for spec in (*s.inputs, *s.outputs))


def test_an_order_of_many_samples_is_known():
    """Samplers (RecBole's) draw negatives for the users of a batch out of shuffled interactions."""
    users = torch.arange(100_000) // 10
    seen = []

    def make_step(batch):
        model, shuffled = nn.Embedding(10_000, 8).cuda(), users[torch.randperm(100_000)]
        seen.append(shuffled[:batch].numpy())
        return lambda: model(shuffled[:batch].cuda()).sum().backward()

    _capture(make_step)
    assert len(set(seen[0].tolist())) > 100


def test_two_gpus_of_one_process_are_told():
    def make_step(batch):
        first, second = nn.Linear(8, 8).to("cuda:0"), nn.Linear(8, 8).cuda(1)
        return lambda: second(first(torch.rand(batch, 8, device="cuda:0")).to("cuda:1")).sum().backward()

    assert any("several GPUs in one process" in text for text in _capture(make_step).assumptions)


@pytest.mark.parametrize(("gpu", "layers"), [(None, 3), (PretendedGpu("H", (9, 0), 80 << 30, 132), 1)])
def test_a_script_that_asks_is_told_of_the_gpu_it_is_captured_for(gpu, layers):
    def make_step(batch):
        layers = 1 if torch.cuda.get_device_capability() >= (9, 0) else 3
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers))).cuda()
        return lambda: model(torch.rand(batch, 8, device="cuda")).sum().backward()

    with pretend_gpu(gpu):
        workload = _capture(make_step)
    assert len(ops(workload.programs[0], "aten::addmm")) == layers
    assert any("asks which GPU it has" in text for text in workload.assumptions)


def test_a_thread_that_copies_the_next_batch_is_followed():
    def make_step(batch):
        model, got = nn.Linear(8, 8).cuda(), {}

        def step():
            worker = threading.Thread(target=lambda: got.update(x=torch.rand(batch, 8).cuda()))
            worker.start()
            worker.join()
            model(got["x"]).sum().backward()

        return step

    assert [op.phase for op in ops(_capture(make_step).programs[0], "aten::_to_copy")] == [Phase.INPUT]


def test_what_a_thread_reads_stays_on_the_host_while_another_copies_to_the_device(monkeypatch):
    """Threads that load weights (safetensors reads bytes of storages): one may run between the start of another's copy
    and the op that makes it."""
    read = []

    def switch(name):
        other = threading.Thread(target=lambda: read.append(torch.ones(8, dtype=torch.uint8).untyped_storage()[0]))
        other.start()
        other.join()
        return contextlib.nullcontext()

    def make_step(batch):
        model, given = nn.Linear(8, 8).cuda(), torch.rand(batch, 8)
        with monkeypatch.context() as patch:
            patch.setattr(devices, "_RecordFunctionFast", switch)
            given = given.to("cuda")
        return lambda: model(given).sum().backward()

    _capture(make_step)
    assert read and set(read) == {1}


def test_cuda_graphs_of_the_compiler_are_named():
    def make_step(batch):
        model = nn.Linear(8, 8).cuda()
        run = torch.compile(model, mode="reduce-overhead")
        return lambda: run(torch.rand(batch, 8, device="cuda")).sum().backward()

    assert any("replays CUDA graphs" in text for text in _capture(make_step).assumptions)


def test_what_is_trained_on_the_host_gets_its_gradient_back_from_the_device():
    """RecBole's SINE makes weights with `torch.tensor(..., requires_grad=True).to(device)`."""
    kept = []

    def make_step(batch):
        leaf = torch.tensor([[1.0] * 8] * 4, requires_grad=True)
        weight, x = leaf.to("cuda"), torch.rand(batch, 8).cuda()
        kept.append(leaf)
        return lambda: (x @ weight.t()).sum().backward(retain_graph=True)

    copy = ops(_capture(make_step).programs[0], "aten::_to_copy")[-1]
    assert copy.phase is Phase.BACKWARD and "cpu" in str(copy.signature)
    assert {(leaf.grad.device.type, leaf.grad.shape) for leaf in kept} == {("cpu", (4, 8))}
