import json
import math
import stat
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ir.steps import make_mlp, make_workload, same_program, spec
from traincast.ir import (
    Phase,
    Program,
    ProgramBuilder,
    Signature,
    StorageKind,
    Workload,
    load_workload,
    save_workload,
)
from traincast.ir.generalise import capture_sizes, generalise_captures
from traincast.utils.errors import TraincastError

TEXT = st.text(max_size=8).filter(str.isprintable)  # other names are rejected, see test_validate
SCALAR = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Any program the builder can make, with strange names and arguments."""
    builder = ProgramBuilder(batch_size=draw(st.integers(1, 64)), seq_len=draw(st.integers(0, 64)))
    tensors = [
        builder.add_tensor(builder.add_storage(draw(st.integers(0, 2**40)), StorageKind.BUFFER, before_step=True))
    ]
    device = draw(st.sampled_from(["cuda", "cpu", "cpu:pinned"]))
    for _ in range(draw(st.integers(0, 4))):
        thread = draw(st.integers(0, 2))
        builder.open_scope(draw(TEXT), draw(st.sampled_from(Phase)), thread=thread, after=builder.num_scopes - 1)
        for _ in range(draw(st.integers(0, 3))):
            inputs = draw(st.lists(st.sampled_from(tensors), max_size=3))
            tensors.append(builder.add_tensor(builder.add_storage(draw(st.integers(0, 2**40)))))
            scalars = draw(st.lists(st.tuples(TEXT, SCALAR), max_size=3))
            dtype = draw(st.sampled_from(["float32", "bfloat16", "int64", "bool"]))
            shape = draw(st.lists(st.integers(0, 2**16), max_size=3))  # at most 2**50 elements: what a file may hold
            specs = tuple(spec(*shape, dtype=dtype, device=device if t == tensors[0] else "cuda") for t in inputs)
            signature = Signature(draw(TEXT), specs, (spec(2),), tuple(scalars), overload=draw(TEXT))
            forward = draw(st.integers(-1, builder.num_ops - 1))
            builder.add_op(
                signature, inputs, tensors[-1:], module=draw(TEXT), stream=draw(st.integers(0, 9)), forward=forward
            )
            if draw(st.booleans()):
                builder.free_storage(tensors.pop(draw(st.integers(1, len(tensors) - 1))))  # one tensor per storage
    return replace(builder.build_program(), rigid=draw(TEXT))


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=80)
@given(
    program=programs(), name=TEXT, ranks=st.lists(st.just(0), min_size=1, max_size=9), meta=st.dictionaries(TEXT, TEXT)
)
def test_a_workload_comes_back_as_it_was_saved(
    tmp_path: Path, program: Program, name: str, ranks: list[int], meta: dict[str, str]
) -> None:
    saved = Workload(name=name, programs=(program,), ranks=tuple(ranks), mode="inference", synchronised=True, meta=meta)
    save_workload(saved, tmp_path / "step.tc")
    loaded = load_workload(tmp_path / "step.tc")
    assert same_program(loaded.programs[0], program)
    assert (loaded.name, loaded.ranks, loaded.mode, loaded.synchronised) == (name, tuple(ranks), "inference", True)
    assert (loaded.framework_version, dict(loaded.meta)) == (saved.framework_version, meta)


def test_scalars_keep_their_type(tmp_path: Path) -> None:
    # Given arguments that JSON alone would confuse
    values = (1, 1.0, True, "1", None, math.inf, -math.inf, math.nan, (1, (2.0, (False, "size"))), (), -0.0, 2**62)
    builder = ProgramBuilder(batch_size=1)
    builder.open_scope("s", Phase.FORWARD)
    for i, value in enumerate(values):
        builder.add_op(Signature("x::y", (), (), ((f"v{i}", value),)), [], [])
    # When saved and loaded
    save_workload(Workload(name="w", programs=(builder.build_program(),)), tmp_path / "w.tc")
    loaded = load_workload(tmp_path / "w.tc").programs[0]
    # Then each is what it was
    assert [repr(op.signature.scalars[0][1]) for op in loaded.ops] == [repr(value) for value in values]


def test_a_general_program_is_resized_after_loading(tmp_path: Path) -> None:
    program = generalise_captures([make_mlp(batch=b, seq=s) for b, s in capture_sizes(8, 32)])
    save_workload(Workload(name="w", programs=(program,)), tmp_path / "w.tc")
    resized = load_workload(tmp_path / "w.tc").resized(batch_size=3, seq_len=100)
    assert [op.signature for op in resized.programs[0].ops] == [op.signature for op in make_mlp(batch=3, seq=100).ops]


def test_padded_sizes_are_kept(tmp_path: Path) -> None:
    captures = [make_mlp(batch=b, seq=s, extra=lambda b, s: -(-s // 32) * 32) for b, s in capture_sizes(4, 128)]
    save_workload(Workload(name="w", programs=(generalise_captures(captures),)), tmp_path / "w.tc")
    loaded = load_workload(tmp_path / "w.tc").resized(seq_len=161).programs[0]
    assert loaded.ops[1].signature.scalar("extra") == 192


def test_several_programs_and_ranks(tmp_path: Path) -> None:
    saved = Workload(name="w", programs=(make_mlp(batch=4), make_mlp(batch=4, layers=3)), ranks=(0, 1, 1, 0))
    save_workload(saved, tmp_path / "w.tc")
    loaded = load_workload(tmp_path / "w.tc")
    assert loaded.ranks == (0, 1, 1, 0)
    assert all(same_program(a, b) for a, b in zip(loaded.programs, saved.programs, strict=True))


def test_the_same_workload_gives_the_same_bytes(tmp_path: Path) -> None:
    save_workload(make_workload(), tmp_path / "a.tc")
    time.sleep(0.01)
    save_workload(load_workload(tmp_path / "a.tc"), tmp_path / "b.tc")
    assert (tmp_path / "a.tc").read_bytes() == (tmp_path / "b.tc").read_bytes()


def test_columns_are_plain_npy_in_the_smallest_type(tmp_path: Path) -> None:
    save_workload(make_workload(), tmp_path / "w.tc")
    with zipfile.ZipFile(tmp_path / "w.tc") as archive, archive.open("programs/0/op_forward.npy") as stream:
        forward = np.load(stream, allow_pickle=False)
        assert json.loads(archive.read("workload.json"))["version"] == 1
    assert forward.dtype == np.int8
    assert forward.tolist() == [-1, -1, -1, -1, 2, 1, -1]


def test_a_step_of_thousands_of_ops_is_small_and_loads_fast(tmp_path: Path) -> None:
    # Given 4,000 ops of 300 signatures, about a GPT-3 XL training step
    builder = ProgramBuilder(batch_size=4, seq_len=2048)
    tensors = [builder.add_tensor(builder.add_storage(512 * i)) for i in range(300)]
    for i in range(4000):
        if not i % 2:
            builder.open_scope("aten::linear", Phase.FORWARD)
        kind = i * 7 % 300
        builder.add_op(
            Signature(f"aten::op{kind % 40}", (spec(4, 2048, kind), spec(kind, 8)), (spec(4, 2048, 8),), (("a", 1),)),
            [tensors[i % 300], tensors[i * 3 % 300]], [tensors[(i + 1) % 300]], module=f"transformer.h.{i // 170}",
        )  # fmt: skip
    path = tmp_path / "large.tc"
    save_workload(Workload(name="large", programs=(builder.build_program(),)), path)
    # Then it is small, and loads in milliseconds of processor time (about 10; the limit allows for a slow machine)
    fastest = min(_seconds_to_load(path) for _ in range(7))
    assert path.stat().st_size < 100_000
    assert fastest < 0.1, f"{fastest * 1e3:.1f} ms"


def _seconds_to_load(path: Path) -> float:
    start = time.process_time()
    load_workload(path)
    return time.process_time() - start


def test_writing_replaces_the_file_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "w.tc"
    path.write_bytes(b"old")
    save_workload(make_workload(), path)
    assert load_workload(str(path)).name == "mlp"
    assert [item.name for item in tmp_path.iterdir()] == ["w.tc"]
    assert stat.S_IMODE(path.stat().st_mode) & stat.S_IRUSR


def test_a_file_that_cannot_be_written_or_read_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(TraincastError, match=r"cannot write .*nowhere.*there is no folder"):
        save_workload(make_workload(), tmp_path / "nowhere" / "w.tc")
    (tmp_path / "folder").mkdir()
    with pytest.raises(TraincastError, match="cannot write"):
        save_workload(make_workload(), tmp_path / "folder")
    assert [item.name for item in tmp_path.iterdir()] == ["folder"]
    with pytest.raises(TraincastError, match=r"missing\.tc: cannot be read: No such file"):
        load_workload(tmp_path / "missing.tc")
    with pytest.raises(TraincastError, match="cannot be read: it is no file"):
        load_workload(tmp_path / "folder")


def test_a_broken_workload_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(TraincastError, match="rank 0 runs program 1"):
        save_workload(replace(make_workload(), ranks=(1,)), tmp_path / "w.tc")
    assert not list(tmp_path.iterdir())
