"""Every command that writes, ended at random moments: `python -m tests.app.cli.interrupting --times 50 --seed 1`.

Nothing may be half written, and what was there before stays or gives way to the whole new file. Half of the signals
come at any moment of the command, half while a draft of its output exists. Commands run in forks of one process that
has imported everything, so that the moments fall into their work; `test_manners.py` has those of start-up. The disk is
full in another round: the system rejects to write more than a part of the file.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.traces.damaged import kineto_document
from traincast.app.cli import main as command_line

ENDING = (signal.SIGINT, signal.SIGTERM)
BEFORE = b"what was there before"
COMMANDS = {
    "predict": "predict dlrm-ddp --on v100 --trace-out out",
    "export": "export dlrm-ddp --out out",
    "export to Chakra": "export dlrm-ddp --to chakra --out out",
    "capture": "capture step.py:make --batch-size 4 --out out",
    "trace": "trace trace.json --trace-out out",
    "trace to a workload": "trace trace.json --workload-out out",
    "trace to tables": "trace trace.json --tables-out .",
    "shard": "shard tables.yaml --on dgx-a100 --gpus 2 --no-torchrec --time-limit 0.1 --out out",
    "shard for TorchRec": "shard tables.yaml --on dgx-a100 --gpus 2 --no-torchrec --time-limit 0.1 --torchrec-out out",
    "fit": "fit attention --out .",
    "fits": "fits mpt-125m --on h100 --seq-len 128 --snapshot-out out",
    "compare": "compare dlrm-ddp --on v100,h100 --image out.svg",
    "report": "report dlrm-ddp --on v100 -o out.html",
    "sweep": "sweep dlrm-ddp --on v100 --vary batch-size=8,16,32 --processes 1 --out out.csv",
    "sweep with a picture": "sweep dlrm-ddp --on v100 --vary batch-size=8,16 --processes 1 -o out.csv --image out.svg",
    "check": "check step.yaml --baseline out.json --update --reason first",
    "plan": "plan tiny.yaml --on dgx-a100 --gpus 2 --global-batch 4 --write torchtitan --out out.toml",
}
TARGETS = {
    "fit": ("costs/kernels/profiles/attention.json", "costs/kernels/profiles/attention.npz"),  # all or none
    "compare": ("out.svg",), "report": ("out.html",), "sweep": ("out.csv",), "check": ("out.json",),
    "plan": ("out.toml",), "sweep with a picture": ("out.csv", "out.svg"),
    "trace to tables": tuple(f"{name}.csv" for name in ("critical_path", "kernels", "launches", "overheads",
                             "queue_curve", "steps", "streams", "top_kernels")),
}  # fmt: skip
"""Where the output of a command goes ("out")."""
_BEFORE_OF = {"check": b'{"traincast_baseline": 1, "scenarios": {}}'}  # a baseline is read before it is written
STEP = """import torch

def make(batch_size):
    layer = torch.nn.Linear(4, 4).to("cuda")
    x = torch.randn(batch_size, 4, device="cuda")
    return lambda: layer(x).sum().backward()
"""


class Trial:
    """One command in a folder of its own, with a file where its output goes. `warm` runs it in this process first, so
    that forks find loaded what it reads; not for commands that use torch, whose threads a fork does not have."""

    def __init__(self, name: str, folder: Path, *, warm: bool = False) -> None:
        self.words = COMMANDS[name].split()
        self.folder = folder
        self.targets = [folder / path for path in TARGETS.get(name, ("out",))]
        self.before = _BEFORE_OF.get(name, BEFORE)
        (folder / "step.yaml").write_text("{workload: dlrm-ddp, on: v100, batch_size: 64}")
        (folder / "tiny.yaml").write_text("{layers: 2, hidden: 64, heads: 4, ffn: 128, vocab: 256, seq_len: 64}")
        (folder / "step.py").write_text(STEP)
        (folder / "trace.json").write_text(json.dumps(kineto_document()))
        (folder / "tables.yaml").write_text("tables: [{name: a, rows: 1000, dim: 16}, {name: b, rows: 90, dim: 8}]")
        self.targets[0].parent.mkdir(parents=True, exist_ok=True)
        if warm:
            with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
                command_line.main(self.words)
        start = time.monotonic()
        status, said = self.run()
        self.seconds = time.monotonic() - start
        if status:
            raise AssertionError(f"{self.words} ends with {status}: {said}")
        self.wholes = self.contents()

    def contents(self) -> list[bytes]:
        """What stands in the files now."""
        return [target.read_bytes() for target in self.targets]

    def run(
        self, interfere: Callable[[int], None] = lambda _: None, prepare: Callable[[], None] = lambda: None
    ) -> tuple[int, str]:
        """The command in a fork with the old file in place: its exit code, and what it said on stderr."""
        for target in self.targets:
            target.write_bytes(self.before)
            target.with_name(target.name + ".points").unlink(missing_ok=True)  # what an interrupted sweep goes on from
        reader, writer = os.pipe()  # no file: a full disk is none of its business
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # the child lets them in when it is ready
        child = os.fork()
        if child == 0:
            _become(self.words, self.folder, writer, prepare)
        os.close(writer)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        interfere(child)
        _, status = os.waitpid(child, 0)
        with os.fdopen(reader, "rb") as stderr:
            return os.waitstatus_to_exitcode(status), stderr.read().decode()

    def drafts(self) -> list[Path]:
        """Files half written, alongside the target."""
        return [path for path in self.targets[0].parent.iterdir() if path.name.endswith(".tmp")]

    def ended(self, number: int, rng: random.Random) -> str:
        """What is wrong after a signal at a random moment ("" for nothing)."""
        while_writing = rng.random() < 0.5

        def interfere(child: int) -> None:
            end = time.monotonic() + (20 if while_writing else rng.uniform(0, 1.1 * self.seconds))
            while time.monotonic() < end and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                if while_writing and self.drafts():
                    break
                time.sleep(0.0005 if while_writing else 0.002)
            time.sleep(rng.uniform(0, 0.002))
            os.kill(child, number)  # of a process that has ended nobody has asked, so its number is still its own

        code, said = self.run(interfere)
        return self.wrong(number, code, said)

    def wrong(self, number: int, code: int, said: str) -> str:
        """What is wrong with the files and the result after a signal ("" for nothing)."""
        drafts = self.drafts()
        for draft in drafts:
            draft.unlink()
        are_old = [content == self.before for content in self.contents()]
        if any(not old and now != whole for old, now, whole in zip(are_old, self.contents(), self.wholes, strict=True)):
            return "half written"
        if number == signal.SIGKILL:
            return "" if code in (0, -number) else f"exit code {code}: {said[-400:]!r}"
        if drafts or len(set(are_old)) > 1:
            return f"{len(drafts)} drafts left, old files: {are_old}"
        # a signal while the process ends by itself is the system's to answer
        if code not in (0, 128 + number, -number) or "internal" in said or "Traceback" in said:
            return f"exit code {code}: {said[-400:]!r}"
        return ""

    def on_a_full_disk(self, rng: random.Random) -> str:
        """What is wrong after the disk was full at a random byte of the output ("" for nothing)."""
        most = rng.randrange(max(map(len, self.wholes)))

        def limit() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

        code, said = self.run(prepare=limit)
        if self.drafts() or set(self.contents()) != {self.before}:
            return "the disk full: the old file is lost, or a draft is left"
        is_one_line = code == 2 and _last_line(said).startswith("traincast: ")
        return "" if is_one_line else f"the disk full: exit code {code}: {said[-400:]!r}"


def _last_line(said: str) -> str:
    """What stands below a progress bar."""
    return said.rstrip().replace("\r", "\n").rpartition("\n")[2]


def _become(words: list[str], folder: Path, stderr: int, prepare: Callable[[], None]) -> None:
    """The child: runs the command line as a program of its own would, and ends."""
    code = 99
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the command line has its own
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(stderr, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        sys.argv = ["traincast", *words]
        prepare()
        code = command_line.main()
    except BaseException:  # what comes out of the command line is a finding, and its place is wanted
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        os._exit(code)


def imported(*commands: str) -> None:
    """Imports what the commands of these commands need."""
    for command in {command.split()[0] for command in commands}:
        importlib.import_module(f"traincast.app.cli.commands.{command}")


def broken(name: str, times: int, seed: int, folder: Path, *, warm: bool = False) -> Counter[str]:
    """What broke the promise, and how often, of this many SIGKILLs, SIGINTs and full disks, and a fifth of SIGTERMs."""
    trial, rng, problems = Trial(name, folder, warm=warm), random.Random(f"{name} {seed}"), Counter[str]()
    for time_number in range(times):
        for number in (signal.SIGKILL, signal.SIGINT, *([signal.SIGTERM] if time_number % 5 == 0 else [])):
            problems[trial.ended(number, rng)] += 1
        problems[trial.on_a_full_disk(rng)] += 1
    del problems[""]
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=50, help="SIGKILL, SIGINT and a full disk each; SIGTERM a fifth")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=COMMANDS)
    parser.add_argument("--log", type=Path, help="where the result of each command is added as a line")
    args = parser.parse_args()
    imported(*COMMANDS.values())
    found = 0
    for name in COMMANDS if args.only is None else [args.only]:
        with tempfile.TemporaryDirectory() as folder:
            problems = broken(name, args.times, args.seed, Path(folder))
        found += problems.total()
        if args.log:
            row = {"command": name, "times": args.times, "broken": problems.total(), "date": time.strftime("%Y-%m-%d")}
            with args.log.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(
            f"{name}: {args.times} times each, {problems.total()} broke the promise",
            *problems,
            sep="\n    ",
            flush=True,
        )
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
