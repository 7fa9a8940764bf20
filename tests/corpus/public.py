"""Public training scripts (`public.toml`), fetched at fixed commits, captured and predicted: how each came out.

DIR has a clone of every repository as `owner+name` (a work tree, a bare one, or a folder with `repo` inside); what is
not there is skipped. Files of the commit, and random data, go to a work folder, where the scripts run.
"""

from __future__ import annotations

import json
import os
import re
import resource
import runpy
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.corpus.made_data import make_file

LIST = Path(__file__).with_name("public.toml")
STAND_INS = Path(__file__).with_name("stand_ins.py")
_ABSENT = re.compile(r"ModuleNotFoundError|ImportError|FileNotFoundError|No such file|ConnectionError|offline|network")
_LARGEST = 4 << 20  # bytes of a file of a repository that is taken


@dataclass(frozen=True)
class Script:
    """One script: `batch` is what is said of its size, `samples` what an update of it has (None: the batch)."""

    name: str
    repository: str
    commit: str
    file: str
    arguments: str = ""
    folder: str = ""
    path: str = ""  # of modules it imports
    cwd: str = ""  # where it is run; where it is by default
    batch: int | None = None
    seq_len: int | None = None
    samples: int | None = None
    gpus: int | None = None
    ranks: str = ""
    assume: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    stand_ins: bool = False
    on_cpu: str = ""  # its arguments for a run on a CPU ("same": those of the capture), where it is compared with one


@dataclass
class Trial:
    """How one script came out: any size, one size, refused, raw, own error (it fails so without a capture too), absent
    (what it needs is not here) or too long."""

    name: str
    outcome: str
    why: str = ""
    ops: int = 0
    samples: float = 0.0
    stated: float = 0.0  # samples of an update by the script's own arithmetic; 0: not stated
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    milliseconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    differences: list[str] | None = None  # from a real run on a CPU; None: not compared

    @property
    def samples_agree(self) -> bool:
        """Whether as many samples are counted as the script has; where nothing says how many, they do."""
        return not self.ops or not self.stated or abs(self.samples - self.stated) < 1e-9


def list_scripts() -> list[Script]:
    """Every script of the list."""
    found = []
    for repository in tomllib.loads(LIST.read_text(encoding="utf-8"))["repository"]:
        where = {"commit": repository["commit"], "folder": repository.get("folder", "")}
        for name, fields in repository["scripts"].items():
            lists = {key: tuple(fields.pop(key, ())) for key in ("assume", "data")}
            found.append(Script(name, repository["name"], **where, **lists, **fields))
    return found


def check_out(script: Script, sources: Path, work: Path) -> Path | None:
    """The folder with the files of the script's commit and its data; None where there is no clone."""
    clone = sources / script.repository.replace("/", "+")
    clone = clone / "repo" if (clone / "repo").is_dir() else clone
    if not clone.is_dir():
        return None
    folder = work / script.repository.replace("/", "+")
    if not folder.is_dir():
        for path, blob in _list_files(clone, script):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            got = subprocess.run(["git", "-C", str(clone), "cat-file", "blob", blob], capture_output=True, check=False)
            if not got.returncode:
                (folder / path).write_bytes(got.stdout)
    for item in script.data:
        kind, _, target = item.partition(" ")
        if not (folder / target).exists():
            make_file(kind, folder / target)
    return folder


def _list_files(clone: Path, script: Script) -> Iterator[tuple[str, str]]:
    command = ["git", "-C", str(clone), "ls-tree", "-r", "-l", script.commit, *script.folder.split()]
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        facts, _, path = line.partition("\t")
        _, kind, blob, size = facts.split()
        if kind == "blob" and size.isdigit() and int(size) <= _LARGEST:
            yield path, blob


def try_script(script: Script, folder: Path, *, limit: float = 240.0) -> Trial:
    """Captures and predicts the script in a process of its own, forked from this one, which has PyTorch loaded; what
    came of it is kept in a file for `read_trial`."""
    begun, said = time.perf_counter(), folder.parent / f"{script.name}.json"
    said.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        _run_child(script, folder, said, limit)
    ended, used = _wait(child, begun + 1.2 * limit)
    if ended is None:
        trial = Trial(script.name, "too long", f"not done in {limit:.0f} s")
    elif not said.exists():
        trial = Trial(script.name, "raw", f"the process ended with {os.waitstatus_to_exitcode(ended)}")
    else:
        trial = Trial(**json.loads(said.read_text()))
        if trial.outcome == "raw" and _fails_alone(script, folder, trial.why, limit):
            trial.outcome = "own error"
    trial.seconds, trial.cpu_seconds = time.perf_counter() - begun, used.ru_utime + used.ru_stime
    keep_trial(trial, folder.parent)
    return trial


def _fails_alone(script: Script, folder: Path, why: str, limit: float) -> bool:
    """Whether the script fails at the same line with the same error when it just runs, on this CPU."""
    said = folder.parent / f"{script.name}.alone"
    said.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        try:
            os.setsid()
            turn_streams(folder.parent / f"{script.name}.alone.log")
            _run_alone(script, folder, said)
        finally:
            os._exit(0)
    _wait(child, time.perf_counter() + limit)
    place, _, error = said.read_text().partition("\n") if said.exists() else ("", "", "")
    return bool(place) and why.startswith(f"{place}: the run failed ") and f": {error}; " in why


def _run_alone(script: Script, folder: Path, said: Path) -> None:
    """Runs the script and leaves where and how it fails."""
    from traincast.capturing.errors import find_raised_line, format_one_line

    try:
        target = set_arguments(script, folder, script.arguments)
        runpy.run_path(target, run_name="__main__")
    except Exception as error:
        place = find_raised_line(error.__traceback__).replace(str(folder.parent), "")
        said.write_text(f"{place}\n{format_one_line(error)}")


def keep_trial(trial: Trial, work: Path) -> None:
    """Leaves what came of a script in its work folder."""
    (work / f"{trial.name}.json").write_text(json.dumps(asdict(trial)))


def read_trial(script: Script, work: Path) -> Trial | None:
    """What came of a script in an earlier run in this work folder; None where it was not tried there."""
    said = work / f"{script.name}.json"
    return Trial(**json.loads(said.read_text())) if said.exists() else None


def _wait(child: int, until: float) -> tuple[int | None, resource.struct_rusage]:
    while time.perf_counter() < until:
        ended, status, used = os.wait4(child, os.WNOHANG)
        if ended:
            return status, used
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    return None, os.wait4(child, 0)[2]


def _run_child(script: Script, folder: Path, said: Path, limit: float) -> None:
    os.setsid()
    turn_streams(folder.parent / f"{script.name}.log")
    said.write_text(json.dumps(asdict(_capture(script, folder, limit))))
    os._exit(0)


def turn_streams(file: Path) -> None:
    """What this process prints goes to a file, and it has nothing to read."""
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for number in (1, 2):
        os.dup2(log, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def enter_folder(script: Script, folder: Path) -> list[str]:
    """Goes where the script runs; gives what Python is to run, and its arguments."""
    file = folder / script.file
    os.chdir(folder / script.cwd if script.cwd else file.parent)
    if script.path:
        sys.path.insert(0, str(folder / script.path))
    return [str(STAND_INS), str(file)] if script.stand_ins else [str(file)]


def set_arguments(script: Script, folder: Path, arguments: str) -> str:
    """Goes where the script runs, with these arguments as the program's; gives the file that is to be run."""
    target, *first = enter_folder(script, folder)
    text = arguments.replace("{batch_size}", str(script.batch)).replace("{seq_len}", str(script.seq_len))
    sys.argv = [target, *first, *shlex.split(text)]
    sys.path.insert(0, str(Path(target).parent))
    return target


def _capture(script: Script, folder: Path, limit: float) -> Trial:
    import traincast
    from traincast.utils.errors import TraincastError

    target, *first = enter_folder(script, folder)
    given: dict[str, Any] = {"batch_size": script.batch, "seq_len": script.seq_len, "gpus": script.gpus}
    ranks = [int(rank) for rank in script.ranks.split(",") if rank] or None
    try:
        workload = traincast.capture(
            target, arguments=[*first, *shlex.split(script.arguments)], ranks=ranks,
            name=script.name, assume=list(script.assume) or None, out=folder.parent / f"{script.name}.tc",
            time_limit_s=limit, **given,
        )  # fmt: skip
        on = "dgx-a100" if script.gpus and script.gpus > 1 else "a100-80gb"
        milliseconds = traincast.predict(workload, on=on).iteration * 1e3
    except TraincastError as error:
        why = str(error).replace(str(folder.parent), "")
        return Trial(script.name, _classify(why), why)
    except Exception as error:
        return Trial(script.name, "raw", f"{type(error).__name__}: {error}")
    program = workload.programs[0]
    samples = workload.samples / workload.updates
    return Trial(
        script.name, "one size" if program.rigid else "any size", program.rigid, program.num_ops, samples,
        script.samples or script.batch or 0, milliseconds=milliseconds, notes=list(workload.assumptions),
    )  # fmt: skip


def _classify(why: str) -> str:
    """What kind of refusal this is."""
    if "not done after" in why:
        return "too long"
    if _ABSENT.search(why):
        return "absent"
    return "raw" if re.search(r": the (step|run) failed", why) else "refused"
