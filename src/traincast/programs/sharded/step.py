"""One step of a recommender whose tables are sharded over many ranks, written without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from traincast.embeddings.table import Table, check_tables
from traincast.errors import TraincastError
from traincast.placement.kinds import ShardingKind
from traincast.placement.plan import Plan
from traincast.programs.data_parallel.reducer import Reducer
from traincast.programs.dlrm.config import DlrmConfig
from traincast.programs.optimizers import Stepped, step_together, with_state
from traincast.programs.sharded.config import DcnDense, Dense
from traincast.programs.sharded.dcn import EagerDcn
from traincast.programs.sharded.dense import EagerDense
from traincast.programs.sharded.inputs import Features, copy_features, offsets_of, ordered, redistribute, split
from traincast.programs.sharded.layout import Layout, Section, lay_out
from traincast.programs.sharded.marks import MarkedProgram, Role
from traincast.programs.sharded.outputs import REFERENCE, TORCHREC, Outputs
from traincast.programs.sharded.tables import Lookup
from traincast.programs.sharded.tape import MarkedTape
from traincast.programs.tape import Ref
from traincast.workload.ops import Phase, StorageKind
from traincast.workload.program import Program
from traincast.workload.template import share_templates
from traincast.workload.workload import Workload

MAX_RANKS = 4096
"""Every rank exchanges with every other: time and memory of a prediction grow with the square of the ranks."""
MODULE = "Dlrm"
DENSE_OPTIMIZERS = {"sgd": "sgd", "adagrad": "adagrad", "rowwise_adagrad": "adagrad", "adam": "adam"}
"""The optimizer of a copied table, by that of the table. TorchRec fuses optimizers into sharded tables only: a copied
one is a parameter like any other, and a row-wise one becomes that of the dense part's kind."""
_PREFETCH = 16  # the stream of the next batch, beyond those of the communicators
_RIGID = "how often rows repeat depends on the batch size; build it anew for another one"


def sharded_dlrm(
    dense: Dense | DlrmConfig | None,
    tables: Sequence[Table],
    plan: Plan,
    *,
    batch_size: int,
    gpus_per_node: int = 8,
    redistribute_inputs: bool = True,
    index_dtype: str = "int64",
    pipelined: bool = False,
    name: str = "sharded-dlrm",
) -> Workload:
    """One training step under a plan, for `batch_size` samples per rank; `pipelined` as TorchRec's
    `TrainPipelineSparseDist` runs it, which copies and distributes the next batch beside this step.

    Without a dense part it is the lookups, their exchange, and the way back from gradients that are there. Without
    `redistribute_inputs` every rank is fed the row numbers of its own parts, as facebookresearch/dlrm does.
    """
    check_ranks(plan.world_size)
    tables = check_tables(tables)
    dense = Dense.of(dense) if isinstance(dense, DlrmConfig) else dense
    layout = lay_out(tables, plan, batch_size=batch_size, gpus_per_node=gpus_per_node)
    _check(dense, tables)
    first: dict[tuple[object, ...], int] = {}
    ranks = tuple(first.setdefault(layout.key(rank), len(first)) for rank in range(layout.world_size))
    written: list[Program] = []
    templates: dict[tuple[object, ...], Program] = {}
    for number in range(len(first)):
        rank = ranks.index(number)
        program = rank_program(
            layout, rank, dense, tables, redistribute_inputs=redistribute_inputs, index_dtype=index_dtype,
            pipelined=pipelined, like=templates.get(layout.form(rank)),
        ).program  # fmt: skip
        templates.setdefault(layout.form(rank), program)
        written.append(program)
    return Workload(
        name=name,
        programs=tuple(replace(program, rigid=_RIGID) for program in share_templates(written)),
        ranks=ranks,
        mode="training",
        meta={"tables": str(len(tables)), "optimizer": dense.optimizer if dense else ""},
    )


def _check(dense: Dense | None, tables: Sequence[Table]) -> None:
    """Refuses tables that cannot be trained, or that the dense part cannot take."""
    for table in tables:
        if table.optimizer not in DENSE_OPTIMIZERS:
            raise TraincastError(
                f"table '{table.name}' has optimizer '{table.optimizer}'; a training step needs one of "
                f"{', '.join(DENSE_OPTIMIZERS)}"
            )
    if dense is not None and dense.equal_widths:
        wrong = [table for table in tables if table.dim != dense.bottom_mlp[-1]]
        if wrong:
            raise TraincastError(
                f"table '{wrong[0].name}' has dim {wrong[0].dim}; the "
                f"{'dot interaction' if dense.interaction == 'dot' else 'cross network'} needs the bottom MLP's "
                f"{dense.bottom_mlp[-1]}"
            )


def check_ranks(ranks: int) -> None:
    """Refuses numbers of GPUs that tables cannot be sharded over here."""
    if not 1 <= ranks <= MAX_RANKS:
        raise TraincastError(
            f"tables sharded over {ranks} GPUs are out of range; give a whole number from 1 to {MAX_RANKS}"
        )


def rank_program(
    layout: Layout,
    rank: int,
    dense: Dense | None,
    tables: Sequence[Table],
    *,
    redistribute_inputs: bool = True,
    index_dtype: str = "int64",
    pipelined: bool = False,
    like: Program | None = None,
) -> MarkedProgram:
    """The program of one rank, every size at a place of its own; `like` is one of a rank that runs the same ops."""
    tape = MarkedTape(layout.batch_size, rank, layout.world_size, layout.gpus_per_node, like)
    writer = _Writer(tape, layout, dense, tables, redistribute_inputs, index_dtype)
    writer.pipelined = pipelined
    return writer.program()


class _Writer:
    """One rank's step, in the order it runs; `pipelined` distributes the next batch beside it."""

    pipelined: bool = False

    def __init__(
        self, tape: MarkedTape, layout: Layout, dense: Dense | None, tables: Sequence[Table], redistributed: bool,
        index_dtype: str,
    ) -> None:  # fmt: skip
        self.tape, self.layout, self.redistributed, self.index_dtype = tape, layout, redistributed, index_dtype
        self.sections, self.tables = layout.sections, tables
        self.lookups = [
            [Lookup.of(tape, batch, self._samples(section)) for batch in section.ranks[tape.rank]]
            for section in self.sections
        ]
        names = TORCHREC if redistributed else REFERENCE
        self.outputs = [Outputs(tape, layout, section, names) for section in self.sections]
        columns = sum(output.columns for output in self.outputs)
        self.dense = None
        if dense is not None:
            eager = EagerDcn if isinstance(dense, DcnDense) else EagerDense
            self.dense = eager(tape, dense, columns, layout.batch_size)
        self.reshapes: dict[str, int] = {}  # by kind of sharding
        self.copies = self._data_parallel()
        forms = [lookup.weights.spec for lookup in self.copies]
        self.reducer = Reducer(tape, tape.world, forms, as_views=True) if forms else None
        self.stepped: list[Stepped] = [
            state
            for lookup in self.copies
            for state in with_state(tape, DENSE_OPTIMIZERS[lookup.batch.optimizer], [lookup.weights])
        ]

    def _data_parallel(self) -> list[Lookup]:
        pairs = zip(self.sections, self.lookups, strict=True)
        return [lookup for section, lookups in pairs if section.kind.copied for lookup in lookups]

    def _samples(self, section: Section) -> int:
        return section.kind.samples(self.layout.batch_size, self.layout.world_size)

    def program(self) -> MarkedProgram:
        """Everything."""
        features = self._prefetched() if self.pipelined else self._fetched(self._begin)
        for section, lookups, output, taken in zip(self.sections, self.lookups, self.outputs, features, strict=True):
            self._look_up(section, lookups, output, taken)
        embedded = self._forward()
        if self.pipelined:
            with self.tape.on_stream(_PREFETCH):
                self._fetched(lambda: None)
        grads = self._back_to_embeddings(embedded)
        self._backward(grads)
        return self.tape.marked_program()

    def _fetched(self, begin: Callable[[], None]) -> list[list[Features]]:
        """A batch copied from the host, and the lookups of each kernel of this rank in it; `begin` comes between."""
        features = self._inputs()
        begin()
        return self._redistributed(features[0][0]) if self.redistributed else features

    def _begin(self) -> None:
        """The dense part's inputs are copied, and the gradients of the step before go."""
        if self.dense is not None:
            self.dense.inputs()
        if self.reducer is not None:
            self.reducer.drop()

    def _prefetched(self) -> list[list[Features]]:
        """The lookups of each kernel, there already: `TrainPipelineSparseDist` distributed them beside the step
        before."""
        tape, kind = self.tape, StorageKind.INPUT
        tape.scope("TrainPipelineSparseDist.progress", Phase.INPUT)
        tape.wait(tape.record(_PREFETCH))
        with tape.on_stream(_PREFETCH):
            self._begin()
        return [
            [
                Features(
                    tape.resident((kernel.tables * self._samples(section) + 1,), kind, self.index_dtype),
                    tape.resident((kernel.lookups,), kind, self.index_dtype),
                    tape.resident((kernel.lookups,), kind) if kernel.weighted else None,
                )
                for kernel in section.ranks[tape.rank]
            ]
            for section in self.sections
        ]

    def _inputs(self) -> list[list[Features]]:
        """What is copied from the host: this rank's samples, or the row numbers of this rank's parts."""
        tape, batch = self.tape, self.layout.batch_size
        if not self.redistributed:
            return [
                [
                    copy_features(tape, kernel.tables, kernel.lookups, self._samples(section), self.index_dtype,
                                  weighted=kernel.weighted, offsets=True)
                    for kernel in section.ranks[tape.rank]
                ]
                for section in self.sections
            ]  # fmt: skip
        lookups = round(sum(table.lookups(batch) for table in self.tables))
        weighted = any(table.weighted for table in self.tables)
        return [[copy_features(tape, len(self.tables), lookups, batch, self.index_dtype, weighted=weighted)]]

    def _redistributed(self, local: Features) -> list[list[Features]]:
        """The lookups of each kernel, for the samples of all ranks."""
        tape, batch = self.tape, self.layout.batch_size
        result = []
        for section, features in zip(self.sections, ordered(tape, self.sections, local, batch), strict=True):
            batches = section.ranks[tape.rank]
            arrived = features if section.kind.copied else redistribute(tape, section, features, batch)
            parts = split(tape, arrived, batches, self._samples(section)) if arrived is not None else []
            result.append([self._offset(part, section, number) for number, part in enumerate(parts)])
        return result

    def _offset(self, lookups: Features, section: Section, batch: int) -> Features:
        """The lookups of one kernel, by where each bag starts."""
        with self.tape.marked(Role.LOOKUP, section.kind, batch):
            return Features(offsets_of(self.tape, lookups.bags, self.index_dtype), lookups.values, lookups.weights)

    def _look_up(self, section: Section, lookups: list[Lookup], output: Outputs, inputs: list[Features]) -> None:
        """Runs the kernels of a section and sends what they pooled on its way."""
        tape = self.tape
        pooled = []
        for number, (lookup, features) in enumerate(zip(lookups, inputs, strict=True)):
            weights = features.weights if lookup.batch.weighted else None
            with tape.marked(Role.LOOKUP, section.kind, number):
                pooled.append(lookup.forward(features.values, features.bags, weights))
        if section.kind.copied:
            self.local = self._joined(pooled, section)
            return
        if not pooled:
            tape.scope("aten::new_empty", Phase.FORWARD)
            flat = tape.new((0,))
            tape.op("aten::empty", [], [flat], [("size", (0,)), ("dtype", None)], module=MODULE)
        else:
            whole = self._joined(pooled, section)
            with tape.marked(Role.FLATTEN, section.kind):
                tape.scope("aten::reshape")
            flat = tape.view(whole, (whole.shape[0] * whole.shape[1],))
            self.reshapes[section.kind] = tape.op(
                "aten::view", [("self", whole)], [flat], [("size", (-1,))], module=MODULE
            )
        output.start(flat)

    def _joined(self, pooled: list[Ref], section: Section) -> Ref:
        """What several kernels pooled, side by side."""
        if len(pooled) == 1:
            return pooled[0]
        tape = self.tape
        with tape.marked(Role.BESIDE, section.kind):
            tape.scope("aten::cat", Phase.FORWARD)
        joined = tape.new((pooled[0].shape[0], sum(part.shape[1] for part in pooled)))
        tape.op("aten::cat", [("tensors", pooled)], [joined], [("dim", 1)], module=MODULE)
        tape.free(*pooled)
        return joined

    def _forward(self) -> list[tuple[Outputs, list[Ref]]]:
        """The dense part up to the loss, and the pooled embeddings of this rank's samples that it used."""
        if self.dense is not None:
            self.dense.bottom_forward()
        embedded = []
        for section, output in zip(self.sections, self.outputs, strict=True):
            parts = [self.local] if section.kind.copied else output.finish()
            embedded.append((output, parts))
        if self.dense is not None:
            self.dense.top_forward([part for _, parts in embedded for part in parts])
        return embedded

    def _back_to_embeddings(self, embedded: list[tuple[Outputs, list[Ref]]]) -> list[list[Ref]]:
        """Gradients of the pooled embeddings, from the dense part or there before the step."""
        if self.dense is not None:
            with self.tape.marked(Role.DENSE):
                flat = iter(self.dense.backward_top())
            return [[next(flat) for _ in parts] for _, parts in embedded]
        kind = StorageKind.BUFFER
        return [[self.tape.resident(part.shape, kind) for part in parts] for _, parts in embedded]

    def _backward(self, grads: list[list[Ref]]) -> None:
        """Sends gradients back while the bottom MLP computes its own, then updates the tables."""
        tape = self.tape
        together = list(zip(self.sections, self.lookups, self.outputs, grads, strict=True))
        for section, _, output, gradients in reversed(together):
            if not section.kind.copied:
                output.start_backward(gradients)
        if self.dense is not None:
            with tape.marked(Role.DENSE):
                self.dense.backward_bottom()
        dense_grads: list[Ref] = []
        came: list[Ref] = []
        for section, lookups, output, gradients in reversed(together):
            if section.kind.copied:
                dense_grads = self._update(section, lookups, gradients[0])
                tape.free(gradients[0])
            else:
                flat = output.finish_backward()
                if lookups:
                    self._update(section, lookups, self._shaped(flat, section, lookups))
                tape.free(flat)
                came += [flat] if output.names.keeps else []
        if self.reducer is not None:
            self.reducer.finish()
        if self.dense is not None:
            self.dense.end_backward()
        tape.free(*came)
        if self.dense is not None:
            self.dense.step()
        for number, (lookup, stepped, grad) in enumerate(zip(self.copies, self.stepped, dense_grads, strict=True)):
            with tape.marked(Role.STEP, ShardingKind.DATA_PARALLEL, number):
                step_together(tape, DENSE_OPTIMIZERS[lookup.batch.optimizer], [stepped], [grad])

    def _shaped(self, flat: Ref, section: Section, lookups: list[Lookup]) -> Ref:
        """Gradients as [samples, columns] again."""
        tape, forward = self.tape, self.reshapes[section.kind]
        with tape.marked(Role.SHAPE, section.kind):
            tape.scope("ViewBackward0", Phase.BACKWARD)
        shape = (lookups[0].samples, sum(lookup.batch.columns for lookup in lookups))
        whole = tape.view(flat, shape)
        tape.op("aten::view", [("self", flat)], [whole], [("size", shape)], module=MODULE, forward=forward)
        return whole

    def _update(self, section: Section, lookups: list[Lookup], grad: Ref) -> list[Ref]:
        """The backward of each kernel; gives the reduced gradients of data-parallel tables."""
        tape = self.tape
        pieces = [grad]
        if len(lookups) > 1:
            with tape.marked(Role.PART, section.kind):
                tape.scope("CatBackward0", Phase.BACKWARD)
            pieces = tape.slices(grad, [lookup.batch.columns for lookup in lookups], module=MODULE)
        kept = []
        for number, (lookup, piece) in enumerate(zip(lookups, pieces, strict=True)):
            with tape.marked(Role.UPDATE, section.kind, number):
                dense = lookup.kernel.backward(piece)
                if dense is not None and self.reducer is not None:
                    kept.append(self.reducer.accumulate(dense))
                else:  # the tables' own gradient is none, but the engine visits them all the same
                    tape.scope("torch::autograd::AccumulateGrad")
        return kept
