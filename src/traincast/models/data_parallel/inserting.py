"""Writing into a step that is there already, between its scopes and at their ends."""

from __future__ import annotations

from traincast.ir.editor import ProgramEditor
from traincast.ir.program import Program
from traincast.models.layers.builder import Communicator, StepBuilder


class InsertingBuilder(StepBuilder):
    """Writes into `program`, in which `group` communicates on the stream it has there, or on the next free one."""

    def __init__(self, program: Program, group: Communicator) -> None:
        self.program, self.editor = program, ProgramEditor(program)
        self.insertion = self.editor.insertion
        super().__init__(program.batch_size, target=self.insertion)
        self.continue_from(program, group)

    def append_to(self, scope: int) -> None:
        """What follows goes to the end of a scope."""
        self.insertion.append_to(scope)

    def insert_before(self, scope: int) -> None:
        """Scopes that follow are new ones before this one, on the thread of the one they come after."""
        self.insertion.insert_before(scope)
        self.engine_thread = int(self.program.columns.scope_thread[scope - 1]) if scope else 0

    def build_program(self) -> Program:
        """The program with what is new in place."""
        return self.editor.build()
