"""How the time of a prediction grows with the number of ranks, as ratios measured in this run.

    .venv/bin/python benchmarks/ranks.py            # all
    .venv/bin/python benchmarks/ranks.py --quick    # few repetitions and fewer ranks, for a smoke test

The step has 1,700 ops a rank: tables of its own, two uneven all-to-alls with all ranks, and layers whose gradients are
summed in buckets while backward goes on. `cold` predicts programs never seen before (lowering, matching and pricing
included), `warm` the same ones again. A ratio of at most 1 keeps the promise. Medians of processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import tracemalloc
from dataclasses import replace

os.environ.setdefault("OMP_NUM_THREADS", "1")  # limits are for one core; set before numpy is imported
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from traincast.hardware import Platform, load_platform
from traincast.ir.builder import ProgramBuilder
from traincast.ir.ops import Phase, Signature, StorageKind, TensorSpec
from traincast.ir.program import Program
from traincast.ir.sizes import SizeTable
from traincast.ir.workload import Workload
from traincast.simulator.prediction.prediction import predict_step

OPS, BUCKET_EVERY, WIDTH, DIM, BATCH = 1700, 50, 1024, 64, 256
SHARD = 7_000_003  # stands for the size of a rank's shard until it gets its own
SPLITS = 11_000_027  # and from here on for what each rank receives


class _Step:
    """Writes one rank's step."""

    def __init__(self, ranks: int, *, even: bool = False) -> None:
        self.ranks, self.even, self.events = ranks, even, 0
        self.builder = ProgramBuilder(batch_size=BATCH)

    def op(
        self, name: str, shapes: list[tuple[int, ...]], output: tuple[int, ...], stream: int = 0, **scalars: object
    ) -> None:
        specs = [TensorSpec(shape, (*shape[1:], 1), "float32") for shape in (*shapes, output)]
        tensors = [
            self.builder.add_tensor(self.builder.add_storage(spec.nbytes, StorageKind.ACTIVATION)) for spec in specs
        ]
        signature = Signature(name, tuple(specs[:-1]), (specs[-1],), tuple(scalars.items()))
        self.builder.add_op(signature, tensors[:-1], tensors[-1:], stream=stream)

    def control(self, name: str, event: int, stream: int) -> None:
        signature = Signature(f"cuda::{name}", (), (), (("event", event), ("stream", stream)))
        self.builder.add_op(signature, (), (), stream=stream)

    def collective(self, name: str, kind: str, nbytes: int, *, waits: bool, **scalars: object) -> int:
        before, after = self.events, self.events + 1
        self.events += 2
        self.control("event_record", before, 0)
        self.control("stream_wait_event", before, 1)
        shape = (max(nbytes // 4, 1),)
        self.op(f"c10d::{name}", [shape], shape, 1, collective=kind, group=tuple(range(self.ranks)), communicator=0,
                bytes=nbytes, **scalars)  # fmt: skip
        self.control("event_record", after, 1)
        if waits:
            self.control("stream_wait_event", after, 0)
        return after

    def exchange(self) -> None:
        own, others = (SHARD,) * self.ranks, tuple(SPLITS + rank for rank in range(self.ranks))
        for send, receive in ((own, others), (others, own)):
            kind, splits = "all_to_all_v", {"send_splits": send, "recv_splits": receive}
            if self.even:  # as capture has it
                kind, splits = "all_to_all", {}
            self.collective("alltoall_base_", kind, SHARD * self.ranks, waits=True, **splits)

    def program(self) -> Program:
        table = SHARD
        self.builder.open_scope("lookup", Phase.FORWARD)
        self.op("aten::add", [(table,), (table,)], (table,))
        if self.ranks > 1:
            self.builder.open_scope("exchange", Phase.FORWARD)
            self.exchange()
        pending = []
        while self.builder.num_ops < OPS:
            backward = self.builder.num_ops > OPS // 3
            self.builder.open_scope("aten::linear", Phase.BACKWARD if backward else Phase.FORWARD)
            size = WIDTH + 8 * (self.builder.num_ops % 64)
            self.op("aten::mm", [(BATCH, size), (size, WIDTH)], (BATCH, WIDTH))
            self.op("aten::relu", [(BATCH, size)], (BATCH, size))
            if self.ranks > 1 and backward and self.builder.num_ops % BUCKET_EVERY < 2:
                pending.append(self.collective("allreduce_", "all_reduce", 25 << 20, waits=False))
        for event in pending:
            self.control("stream_wait_event", event, 0)
        return self.builder.build_program()


def distinct(ranks: int, template: Program, programs: int | None = None) -> Workload:
    """Every rank has a table of its own size, and sends and receives accordingly; `programs` differ (default: all)."""
    values = template.sizes.at(BATCH, 0)
    count = programs or ranks
    shards = 4096 + 64 * (np.arange(ranks) % count)
    made = []
    for shard in shards[:count].tolist():
        own = np.where(values == SHARD, shard, values)
        own = np.where(values == SHARD * ranks, shard * ranks, own)
        received = (values >= SPLITS) & (values < SPLITS + ranks)
        own[received] = shards[values[received] - SPLITS]
        made.append(replace(template, sizes=SizeTable.constant(own)))
    return Workload(name=f"{ranks} ranks", programs=tuple(made), ranks=tuple(rank % count for rank in range(ranks)))


def identical(ranks: int, template: Program) -> Workload:
    """Every rank has the same table."""
    values = template.sizes.at(BATCH, 0)
    own = np.where(values == SHARD, 4096, np.where(values == SHARD * ranks, 4096 * ranks, values))
    program = replace(template, sizes=SizeTable.constant(own))
    return Workload(name=f"{ranks} identical", programs=(program,), ranks=(0,) * ranks)


def fresh(workload: Workload) -> Workload:
    """The same workload as one never seen before."""
    return replace(workload, programs=tuple(replace(program) for program in workload.programs))


def seconds(workloads: dict[str, Workload], platform: Platform, repeats: int) -> dict[str, tuple[float, float]]:
    """Cold and warm processor seconds of predictions, taken in turn so that a busy machine slows all of them."""
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in workloads}
    for repeat in range(repeats):
        for name, workload in workloads.items():
            if len(workload.programs) > 100 and repeat >= 3:
                continue
            unseen = fresh(workload)
            for taken in times[name]:
                start = time.process_time()
                predict_step(unseen, platform)
                taken.append(time.process_time() - start)
    return {name: (statistics.median(cold), statistics.median(warm)) for name, (cold, warm) in times.items()}


def peak_bytes(workload: Workload, platform: Platform) -> int:
    unseen = fresh(workload)
    tracemalloc.start()
    predict_step(unseen, platform)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def measure(repeats: int, many: int) -> list[dict[str, object]]:
    platform = load_platform("dgx-a100")
    one = distinct(1, _Step(1).program())
    eight, lots = (distinct(n, _Step(n).program()) for n in (8, many))
    same = identical(many, _Step(many, even=True).program())
    predict_step(one, platform)
    times = seconds({"one": one, "eight": eight, "lots": lots, "same": same}, platform, repeats)
    ops = one.programs[0].num_ops
    rows = []
    for state, name in enumerate(("cold", "warm")):
        t = {key: value[state] for key, value in times.items()}
        rows += [
            result(f"8 distinct ranks of {ops} ops, {name}", "5 x one rank", t["eight"] / t["one"], 5),
            result(
                f"{many} distinct ranks, {name}",
                f"{150 * many / 1024:g} x eight ranks",
                t["lots"] / t["eight"],
                150 * many / 1024,
            ),
            result(f"{many} identical ranks, {name}", "2 x one rank", t["same"] / t["one"], 2),
        ]
    few, all_ = (peak_bytes(distinct(many, _Step(many).program(), n), platform) for n in (many // 8, many))
    rows.append(result(f"memory of {many} programs", f"8 x {many // 8} programs", all_ / few, 8))
    return rows


def result(what: str, against: str, times: float, limit: float) -> dict[str, object]:
    return {"what": what, "against": against, "times": round(times, 2), "ratio": round(times / limit, 3)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repetitions, 64 ranks")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = measure(3, 64) if arguments.quick else measure(15, 1024)
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            print(f"{row['ratio']:6.2f}  of {row['against']:<24} {row['what']} ({row['times']} x)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
