"""Steps replayed as CUDA graphs."""

from __future__ import annotations

import pytest

from traincast.ir.compiled import LAUNCH, NODE
from traincast.ir.ops import Phase
from traincast.simulator.scenario.predict import load_step, predict
from traincast.simulator.scenario.resolved import resolve
from traincast.simulator.scenario.scenario import Scenario
from traincast.simulator.scenario.workloads import load_single_gpu_step
from traincast.transforms.fusion import apply_cuda_graphs


def names(program, phase):
    return [
        program.names[name]
        for name, number in zip(program.columns.scope_name, program.columns.scope_phase, strict=True)
        if number == phase
    ]


def test_a_step_without_waits_is_one_graph_and_one_launch():
    question = Scenario(workload="bert-large", on="a100-80gb", batch_size=1, seq_len=128)
    eager = predict(question)
    result = predict(question.replace(cuda_graph=True))

    assert any("replayed as 1 CUDA graph," in warning for warning in result.warnings)
    assert result.host < 0.05 * eager.host
    assert result.device_active == pytest.approx(eager.device_active, rel=0.05)
    assert result.device_active <= result.iteration < eager.iteration


def test_inputs_are_copied_before_the_graph():
    workload, _ = apply_cuda_graphs(load_single_gpu_step(Scenario(workload="dlrm-mlperf", batch_size=64)))
    (program,) = workload.programs
    assert not any(name.startswith((LAUNCH, NODE)) for name in names(program, Phase.INPUT))
    assert any(name.startswith(NODE) for name in names(program, Phase.BACKWARD))


def test_what_breaks_a_graph_is_named_and_runs_between_two():
    # Given a DLRM of the papers, whose interaction indexes with tensors of the host
    workload, said = apply_cuda_graphs(load_single_gpu_step(Scenario(workload="dlrm-default", batch_size=512)))

    assert "replayed as 6 CUDA graphs" in said
    assert "the host waits in aten::_index_put_impl_, aten::_to_copy, aten::index" in said
    (program,) = workload.programs
    scopes = [program.names[number] for number in program.columns.scope_name]
    assert sum(name.startswith(LAUNCH) for name in scopes) == 6


def test_ranks_keep_sharing_what_they_share():
    step, _ = load_step(resolve(Scenario(workload="dlrm-ddp", on="dgx-a100", batch_size=64, gpus=4)))
    graphed, _ = apply_cuda_graphs(step)
    assert len({id(p.columns) for p in graphed.programs}) == len({id(p.columns) for p in step.programs})
