import pytest

from tests.ir.steps import make_mlp, make_workload
from traincast.ir import Workload
from traincast.ir.generalise import capture_sizes, generalise_captures
from traincast.utils.errors import TraincastError


def general(batch: int, seq: int = 0, **options) -> Workload:
    program = generalise_captures([make_mlp(batch=b, seq=s, **options) for b, s in capture_sizes(batch, seq)])
    return Workload(name="net", programs=(program,))


def test_resizing_to_the_same_size_is_no_change() -> None:
    workload = make_workload()
    assert workload.resized() is workload
    assert workload.resized(batch_size=8) is workload


def test_batch_and_length_can_change_alone_or_together() -> None:
    workload = general(8, 32)
    assert workload.resized(batch_size=4).programs[0].ops[1].inputs[0].spec.shape == (4 * 32, 16)
    assert workload.resized(seq_len=64).programs[0].ops[1].inputs[0].spec.shape == (8 * 64, 16)
    both = workload.resized(batch_size=2, seq_len=1024)
    assert (both.batch_size, both.seq_len) == (2, 1024)
    assert both.programs[0].ops[1].inputs[0].spec.shape == (2048, 16)


@pytest.mark.parametrize("batch", [0, -3, 10**12])
def test_a_batch_size_out_of_range_is_refused(batch: int) -> None:
    with pytest.raises(TraincastError, match=f"batch size {batch} is out of range; give an integer from 1"):
        general(8).resized(batch_size=batch)


@pytest.mark.parametrize("seq", [0, -1, 10**12])
def test_a_sequence_length_out_of_range_is_refused(seq: int) -> None:
    with pytest.raises(TraincastError, match=f"sequence length {seq} is out of range"):
        general(8, 32).resized(seq_len=seq)


def test_a_model_without_sequences_takes_no_length() -> None:
    with pytest.raises(TraincastError, match="'net' has no sequence length; leave out `seq_len`"):
        general(8).resized(seq_len=128)


def test_one_capture_cannot_be_resized() -> None:
    with pytest.raises(TraincastError, match="one batch size only"):
        make_workload().resized(batch_size=9)
    with pytest.raises(TraincastError, match="one sequence length only"):
        make_workload(seq=16).resized(seq_len=17)


def test_a_rigid_program_says_why() -> None:
    from dataclasses import replace

    workload = general(8)
    rigid = replace(workload, programs=(replace(workload.programs[0], rigid="it branches on its input"),))
    with pytest.raises(TraincastError, match="it branches on its input"):
        rigid.resized(batch_size=9)


def test_sizes_beyond_64_bits_are_refused_when_used() -> None:
    workload = general(8, 32, extra=lambda b, s: b * s * s).resized(batch_size=1 << 26, seq_len=1 << 20)
    with pytest.raises(TraincastError, match="beyond 64 bits"):
        _ = workload.programs[0].signatures
