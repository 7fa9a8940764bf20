"""Runs changed files through the command line, each within limits, and says what broke the promise.

The promise: exit code 0, 1 or 2 within 20 seconds of CPU time and 2 GiB; with 2 one line on stderr; with 0 a JSON
document whose numbers are finite and whose times are not negative, and a step that takes longer than nothing.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import math
import os
import random
import resource
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz import formats, recorded, settings
from tests.fuzz.formats import FORMATS, Format
from tests.fuzz.recorded import CALL
from tests.fuzz.settings import ASK

SECONDS = 20  # of CPU time: on a loaded machine an honest case may take long by the clock
_PATIENCE = 300  # seconds by the clock until a case that says nothing and computes nothing counts as a hang
MEMORY = 2 << 30  # bytes of a process beyond what it had when it began
_BATCH = 40  # cases of one process; fresh ones keep what one case allocated from the next
_TIMES = ("iteration_ms", "device_active_ms", "device_idle_ms", "host_ms", "step_ms", "time_ms")


@dataclass(frozen=True)
class Finding:
    """A case that broke the promise; its format and seed make it again."""

    format: str
    seed: int
    command: str
    problem: str

    def __str__(self) -> str:
        return f"{self.format} {self.seed}: {self.problem}\n    {self.command}"


def run_cases(
    form: Format, seeds: range, codes: Counter[int] | None = None, *, changed: bool = True
) -> Iterator[Finding]:
    """The cases of a format that break the promise. What kills or hangs a process is found by running on after it.
    `codes` counts how the others ended. Without `changed` files stay as they are made."""
    todo = list(seeds)
    while todo:
        batch, todo = todo[:_BATCH], todo[_BATCH:]
        done, findings, ended = _in_child(form, batch, Counter[int]() if codes is None else codes, changed)
        yield from findings
        if done < len(batch):
            yield Finding(form.name, batch[done], "", ended)
            todo = batch[done + 1 :] + todo


def _in_child(form: Format, seeds: list[int], codes: Counter[int], changed: bool) -> tuple[int, list[Finding], str]:
    """How many cases were done, what they found, and how the process ended when not all were."""
    reader, writer = os.pipe()
    child = _start(form, seeds, writer, changed)
    os.close(writer)
    lines = [json.loads(line) for line in _lines(reader, child)]
    _, status = os.waitpid(child, 0)
    findings = [Finding(form.name, seed, command, problem) for seed, command, problem, _ in lines if problem]
    codes.update(code for _, _, problem, code in lines if not problem)
    killed = f"killed by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"ended with status {status}"
    return (
        len(lines),
        findings,
        f"{killed} (more than {2 * SECONDS} s of CPU time, {_PATIENCE} s of waiting, or memory)",
    )


def _start(form: Format, seeds: list[int], writer: int, changed: bool) -> int:
    """A process that works on the cases: a copy of this one. Once polars has started threads, of which a copy has none
    and waits for them, it is a new one."""
    if "polars" in sys.modules and form in FORMATS:
        os.set_inheritable(writer, True)
        begin = f"import sys; sys.path[:] = {sys.path!r}; from tests.fuzz.running import work_on"
        command = [sys.executable, "-c", f"{begin}; work_on({FORMATS.index(form)}, {seeds!r}, {writer}, {changed})"]
        return os.posix_spawn(sys.executable, command, dict(os.environ))
    child = os.fork()
    if child == 0:
        work_on(form, seeds, writer, changed)
    return child


def work_on(form: Format | int, seeds: list[int], writer: int, changed: bool) -> None:
    """Does the cases of a format (or of that place in the list) within limits and writes a line for each; never
    returns."""
    with contextlib.suppress(BaseException):
        if not changed:
            _leave_unchanged()
        _limit()
        for seed in seeds:
            problem = _case(FORMATS[form] if isinstance(form, int) else form, seed)
            os.write(writer, (json.dumps([seed, *problem]) + "\n").encode())
    os._exit(0)


def _leave_unchanged() -> None:
    for module in (formats, settings, recorded):
        module.mutated = lambda document, *_: document
        module.damaged_bytes = lambda data, _: data
    formats.mutated_messages = lambda data, _: data


def _lines(reader: int, child: int) -> list[bytes]:
    """The whole lines that a child writes; one that says nothing for too long is killed."""
    text = b""
    while select.select([reader], [], [], _PATIENCE)[0]:
        piece = os.read(reader, 1 << 16)
        if not piece:
            break
        text += piece
    else:
        os.kill(child, signal.SIGKILL)
    os.close(reader)
    return [line for line in text.splitlines(keepends=True) if line.endswith(b"\n")]


def _limit() -> None:
    with Path("/proc/self/statm").open(encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _case(form: Format, seed: int) -> tuple[str, str, int]:
    """The command of a case, what is wrong with its result or with files ("" for nothing), and its exit code."""
    with tempfile.TemporaryDirectory() as name:
        place, elsewhere = Path(name) / "case", Path(name) / "elsewhere"
        place.mkdir()
        elsewhere.mkdir()
        command = form.make(random.Random(seed), place)
        before = _read_files(place)
        shown, code = " ".join(command).replace(str(place), "."), -1
        signal.signal(signal.SIGPROF, _late)
        _end_after(2 * SECONDS)  # what hangs where no Python runs never comes to `_late`
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            with contextlib.chdir(elsewhere), _homes_in(elsewhere):
                code, problem = judge([*command, "--json"])
        except _Late:
            problem = f"takes longer than {SECONDS} s"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        return shown, problem or _find_touched(command, place, elsewhere, before), code


@contextlib.contextmanager
def _homes_in(folder: Path) -> Iterator[None]:
    """Whatever is written beside the output is written here."""
    names = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
    held = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, str(folder)))
    temporary, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = temporary
        for name, value in held.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _read_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _find_touched(command: list[str], place: Path, elsewhere: Path, before: dict[str, bytes]) -> str:
    """Files that were given and are not as they were, and files that nobody asked for ("" for none)."""
    after = _read_files(place)
    outputs = {Path(word).name for word in command if str(place) in word}
    # a sweep owns its journal: it goes on in it, begins it anew, and removes it in the end
    lost = [name for name in before if after.get(name) != before[name] and not name.endswith(".points")]
    foreign = [name for name in after if name not in before and Path(name).parts[0] not in outputs]
    foreign = [name for name in foreign if name.removesuffix(".points") not in outputs]
    foreign += [f"elsewhere/{name}" for name in _read_files(elsewhere)]
    if lost or foreign:
        return f"files lost: {', '.join(lost) or 'none'}; foreign files: {', '.join(foreign) or 'none'}"
    return ""


def _end_after(seconds: float) -> None:
    """Has the system end this process when it has computed for so much longer."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + seconds) + 1, hard))


class _Late(BaseException):
    """Time is up."""


def _late(*_: Any) -> None:
    raise _Late


def judged(command: list[str]) -> str:
    """What is wrong with the answer to a command ("" for nothing)."""
    return judge(command)[1]


def judge(command: list[str]) -> tuple[int, str]:
    """The exit code of a command (-1: none), and what is wrong with its answer ("" for nothing)."""
    from traincast.app.cli.main import main

    stdout, stderr = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            code: Any = _SPECIAL[command[0]](command[1:]) if command[0] in _SPECIAL else main(command)
    except SystemExit as stop:
        code = stop.code
    except MemoryError:
        return -1, "MemoryError: more than 2 GiB"
    except Exception as error:
        import traceback

        last = traceback.extract_tb(error.__traceback__)[-1]
        return -1, f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {str(error)[:100]!r}"
    said = stderr.getvalue()
    if code == 2:
        lines = f"{len(said)} characters in {said.count(chr(10))} lines: {said[:80]!r}"
        return 2, "" if _one_line(said) else f"exit code 2 with {lines}"
    if code not in (0, 1):
        return code, f"exit code {code}: {said[:200]!r}"
    return code, _wrong_answer(command, stdout.getvalue())


def _ask(words: list[str]) -> int:
    """What a worker of the server does with a question, printed as the command line would: the exit code."""
    from traincast.app.server.fields import parse_document
    from traincast.app.server.guard import Rejection
    from traincast.app.server.responses import make_result_bytes
    from traincast.utils.errors import TraincastError

    try:
        document = json.loads(words[0])
    except (ValueError, RecursionError):
        document = None
    try:
        if not isinstance(document, dict):
            raise TraincastError("the question has to be a JSON object of fields")
        asked = parse_document(document)
        print(make_result_bytes(asked.text, "answer", {}, lambda _: None).decode())
    except (Rejection, TraincastError) as error:
        print(json.dumps(str(error)), file=sys.stderr)  # what the server sends is JSON
        return 2
    return 0


def _call(words: list[str]) -> int:
    """What an agent gets that calls a tool, printed as the command line would: the exit code."""
    from traincast.app import tools
    from traincast.utils.errors import TraincastError

    try:
        arguments = json.loads(words[1])
    except (ValueError, RecursionError):
        arguments = None
    try:
        tool = getattr(tools, words[0])
        try:
            inspect.signature(tool).bind(**arguments)
        except TypeError:  # says the protocol
            raise TraincastError("the call has to have a JSON object of the tool's arguments") from None
        print(json.dumps(tool(**arguments)))
    except TraincastError as error:
        print(json.dumps(str(error)), file=sys.stderr)
        return 2
    return 0


_SPECIAL = {ASK: _ask, CALL: _call}
"""What stands for a command where none of the command line is meant."""


def run_quietly(command: list[str]) -> str:
    """What a sound command prints."""
    from traincast.app.cli.main import main

    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(io.StringIO()):
        main(command)
    return stdout.getvalue()


def _one_line(said: str) -> bool:
    text = said.removesuffix("\n")
    return text.isprintable() and 0 < len(text) <= 2000 and not text.startswith("usage")


def _wrong_answer(command: list[str], text: str) -> str:
    try:
        result = json.loads(text, parse_constant=lambda name: math.nan)
    except ValueError:
        return f"no JSON on stdout: {text[:80]!r}"
    for name, value in _numbers(result):
        if not math.isfinite(value):
            return f"{name} is {value}"
        if value < 0 and name in _TIMES:
            return f"{name} is negative: {value}"
    if command[0] == "predict" and isinstance(result, dict) and not result.get("iteration_ms", 1) > 0:
        return f"iteration_ms is {result['iteration_ms']}"
    return ""


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


def format_named(name: str) -> Format:
    """A format by its name."""
    return next(form for form in FORMATS if form.name == name)
