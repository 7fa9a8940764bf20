"""Small programs of ranks, written op by op."""

from __future__ import annotations

from traincast.hardware import load_platform
from traincast.ir.builder import ProgramBuilder
from traincast.ir.ops import Phase, Signature, TensorSpec
from traincast.ir.workload import Workload
from traincast.simulator.prediction.prediction import predict_step

MB = 1 << 20


class RankProgram:
    """One rank's step: GEMMs on stream 0, collectives on streams of their own."""

    def __init__(self) -> None:
        self.builder = ProgramBuilder(batch_size=1)
        self.events = 0

    def _op(self, name, shapes, outputs, scalars=(), *, stream=0, module=""):
        specs = [TensorSpec(shape, (*shape[1:], 1), "float32") for shape in (*shapes, *outputs)]
        tensors = [self.builder.add_tensor(self.builder.add_storage(spec.nbytes)) for spec in specs]
        n = len(shapes)
        signature = Signature(name, tuple(specs[:n]), tuple(specs[n:]), tuple(scalars))
        self.builder.add_op(signature, tensors[:n], tensors[n:], stream=stream, module=module)

    def _control(self, name, event, stream):
        self._op(f"cuda::{name}", [], [], [("event", event), ("stream", stream)], stream=stream)

    def compute(self, size, times=1):
        """Products of square matrices."""
        for _ in range(times):
            self.builder.open_scope("aten::mm", Phase.FORWARD)
            self._op("aten::mm", [(size, size), (size, size)], [(size, size)])
        return self

    def collective(
        self, kind="all_reduce", nbytes=4 * MB, group=(0, 1), communicator=0, *, stream=1, wait=True, module="", **more
    ):
        """A collective after what stream 0 has so far; with `wait`, stream 0 goes on after it."""
        before, after = self.events, self.events + 1
        self.events += 2
        self.builder.open_scope("exchange", Phase.FORWARD)
        self._control("event_record", before, 0)
        self._control("stream_wait_event", before, stream)
        scalars = [("collective", kind), ("group", group), ("communicator", communicator), ("bytes", nbytes)]
        shape = (max(nbytes // 4, 1),)
        self._op("c10d::allreduce_", [shape], [shape], [*scalars, *more.items()], stream=stream, module=module)
        self._control("event_record", after, stream)
        if wait:
            self._control("stream_wait_event", after, 0)
        return self

    def build(self):
        return self.builder.build_program()


def workload(*programs, ranks=None, synchronised=True):
    """A workload of these programs; each is one rank's unless `ranks` says otherwise."""
    return Workload(
        name="small",
        programs=tuple(program.build() for program in programs),
        ranks=tuple(range(len(programs))) if ranks is None else ranks,
        synchronised=synchronised,
    )


def predict(*programs, on="dgx-a100", ranks=None, synchronised=True, **options):
    return predict_step(workload(*programs, ranks=ranks, synchronised=synchronised), load_platform(on), **options)
