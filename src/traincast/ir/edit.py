"""Edits of a workload that need no torch: leaving a phase out, renaming a type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from traincast.ir.editor import ProgramEditor
from traincast.ir.ops import DTYPE_BYTES, Phase, Scalar, Signature, TensorSpec
from traincast.ir.program import Program
from traincast.ir.workload import Workload
from traincast.utils.errors import TraincastError, make_unknown_error


def remove_phase(workload: Workload, phase: Phase) -> Workload:
    """The workload without the scopes and ops of `phase`, and without the memory only they used."""
    return replace(workload, programs=tuple(_remove_program_phase(program, phase) for program in workload.programs))


def rename_dtypes(workload: Workload, renames: Mapping[str, str]) -> Workload:
    """The workload with tensor types renamed, e.g. `{"bfloat16": "float16"}`; both must have the same size."""
    for old, new in renames.items():
        for name in (old, new):
            if name not in DTYPE_BYTES:
                raise make_unknown_error("dtype", name, DTYPE_BYTES, "Give torch's name without 'torch.'.")
        if DTYPE_BYTES[old] != DTYPE_BYTES[new]:
            raise TraincastError(f"{old} cannot become {new}: its elements have another size; capture again")
    return replace(workload, programs=tuple(_rename_program_dtypes(program, renames) for program in workload.programs))


def _remove_program_phase(program: Program, phase: Phase) -> Program:
    dropped = program.columns.scope_phase == phase
    if not dropped.any():
        return program
    editor = ProgramEditor(program)
    editor.drop_scopes(dropped)
    return editor.build()


def _rename_program_dtypes(program: Program, renames: Mapping[str, str]) -> Program:
    specs = {id(spec): spec for s in program.symbolic for spec in (*s.inputs, *s.outputs)}
    renamed = {
        key: replace(spec, dtype=renames[spec.dtype]) if spec.dtype in renames else spec for key, spec in specs.items()
    }
    editor = ProgramEditor(program)
    editor.change_signatures(lambda signature: _rename_signature_dtypes(signature, renames, renamed))
    return editor.build()


def _rename_signature_dtypes(
    signature: Signature, renames: Mapping[str, str], specs: Mapping[int, TensorSpec]
) -> Signature:
    """The signature with its tensors looked up in `specs` by identity: a few forms serve thousands of tensors."""

    def scalar(value: Scalar) -> Scalar:
        """A dtype passed as an argument is text: `bfloat16` or `torch.bfloat16`."""
        if isinstance(value, str) and value.removeprefix("torch.") in renames:
            bare = value.removeprefix("torch.")
            return value.removesuffix(bare) + renames[bare]
        return value

    return replace(
        signature,
        inputs=tuple([specs[id(spec)] for spec in signature.inputs]),
        outputs=tuple([specs[id(spec)] for spec in signature.outputs]),
        scalars=tuple([(name, scalar(value)) for name, value in signature.scalars]),
    )
