"""Captures and predicts every set-up of tests/corpus and says how each came out.

`python scripts/try_corpus.py` prints a line each; `--out FILE.md` writes a table of them
(docs/evidence/capturing.md has its sums), `--only WORDS` takes those whose name has the words (given several times: any
of them), `--against-cpu` also compares ops and peak memory with real runs on this CPU, `--one-size` leaves out whether
they can be resized, which takes most of the time. What is not installed is skipped.

`--public DIR` takes the public training scripts of tests/corpus/public.toml instead, at fixed commits, from clones in
DIR (`git clone` them there as owner+name): outcome, size freedom, samples of an update against the script's own
arithmetic, and time. `--work DIR` is where they run (default: a temporary folder); `--resume` goes on after a run that
was stopped there. `--limit SECONDS` bounds each. What fails raw is also just run on this CPU: where that ends with the
same error at the same line, the error is the script's own. With `--against-cpu` those that can are also run for real
on this CPU until their third update, whose ops are compared (order, shapes, types).
`--cases DIR` takes the small programs of DIR that tests/corpus/cases.py has expectations of, on three GPUs.
Exit code 1 if a set-up fails that should not, or a script fails raw.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from textwrap import fill

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.corpus.cases import CASES, find_fault, try_case  # noqa: E402
from tests.corpus.public import Trial, check_out, keep_trial, list_scripts, read_trial, try_script  # noqa: E402
from tests.corpus.public_on_cpu import compare_with_cpu  # noqa: E402
from tests.corpus.running import Outcome, load, run  # noqa: E402
from tests.corpus.setups import Setup  # noqa: E402
from tests.corpus.torchvision_ops import define_missing  # noqa: E402

INTRODUCTION = """# What has been captured

Written by `python scripts/try_corpus.py --out FILE.md`. Models and training set-ups that people run, with the real
classes of the libraries named, few and narrow layers, each captured and predicted on an A100.
*Works* means just that; *one size* that it cannot be resized, and why (not tried with `--one-size`).
*Equal to a CPU* (with `--against-cpu`) gives what a real run of the same step on a CPU shows: whether ops,
shapes and types are the same in the same order, and by how many bytes the real peak of memory, without scratch space
inside ops, is above the captured one (on the device, and numbers that it keeps on the host); where they differ, why.
The real run does as a GPU does where PyTorch chooses by
device: dropout is one op, optimizers go over all tensors at once, `torch.compile` leaves ops as they are written,
attention is in its portable form in both. Left out are copies of host tensors to the device in their own type, as a
CPU makes none, and what a data loader does. Several GPUs are compared with real processes by tests: DDP, FSDP2 and
TorchRec.
"""


def versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    found = []
    names = ("torch", "transformers", "timm", "diffusers", "accelerate", "peft", "torch-geometric", "lightning",
             "torchtitan", "torchrec", "fbgemm-gpu-cpu")  # fmt: skip
    for name in names:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def compared(setup: Setup) -> str:
    """How a real run on this CPU compares: "same ops, 0 of 4,157,048 bytes apart", or why it does not."""
    if not setup.like_cpu:
        return setup.beside
    from tests.corpus.against_cpu import op_differences, peaks

    with tempfile.TemporaryDirectory() as folder:
        differences = op_differences(setup, Path(folder))
    held = peaks(setup)
    bytes_apart = f"{held.unexplained} of {held.real:,} bytes apart"
    print(f"         {setup.name}: {differences[:2] or 'same ops'}, {bytes_apart}", flush=True)
    why = f": {setup.beside}" if setup.beside else ""
    return f"{'same ops' if not differences else 'other ops'}, {bytes_apart}{why}"


def row(setup: Setup, outcome: Outcome, beside: str) -> str:
    rigid = outcome.why and outcome.why != "captured at one size only"
    works = f"works, one size: {outcome.why}" if rigid else "works"
    said = works if outcome.state == "works" else f"{outcome.state}: {outcome.why}"
    where = f"{setup.gpus} GPUs" if setup.gpus else "1 GPU"
    return f"| {setup.name} | {setup.kind} | {where} | {outcome.ops or ''} | {beside} | {plain(said)} |"


def plain(text: str) -> str:
    """A message in one cell, without where things are on this machine."""
    return re.sub(r"\S*/(?:site-packages|corpus)/", "", text).replace("|", "/")


def summary(counts: Counter[str]) -> str:
    tried = sum(counts.values()) - counts["skipped"]
    skipped = f"; {counts['skipped']} skipped, as what they need is not installed" if counts["skipped"] else ""
    return f"{counts['works']} of {tried} work ({100 * counts['works'] / max(1, tried):.0f} %){skipped}"


def write(page: Path, rows: list[str], counts: Counter[str]) -> None:
    head = ["| set-up | kind | on | ops | equal to a CPU | outcome |", "|---|---|---|---:|---|---|"]
    text = [
        INTRODUCTION,
        fill(f"{summary(counts)}. Tried with {versions()}.", 110, break_on_hyphens=False) + "\n",
        *head,
        *rows,
        "",
    ]
    page.write_text("\n".join(text), encoding="utf-8")


def try_public(sources: Path, work: Path, options: argparse.Namespace) -> int:
    """Captures and predicts the public scripts; a line each, and their sums."""
    define_missing()
    import traincast.capturing  # noqa: F401  # once for all: each script runs in a process forked from this one

    trials: list[Trial] = []
    work.mkdir(parents=True, exist_ok=True)
    for script in list_scripts():
        if options.only and not any(words.lower() in script.name for words in options.only):
            continue
        known = read_trial(script, work) if options.resume else None
        folder = check_out(script, sources, work)
        if known:
            trials.append(known)
        elif folder is None:
            trials.append(Trial(script.name, "absent", f"no clone of {script.repository} in {sources}"))
        else:
            trials.append(try_script(script, folder, limit=options.limit))
        comparable = folder is not None and script.on_cpu and trials[-1].ops and trials[-1].differences is None
        if options.against_cpu and folder is not None and comparable:
            trials[-1].differences = compare_with_cpu(script, folder)
            keep_trial(trials[-1], work)
        print(describe_trial(trials[-1]), flush=True)
        if options.out:
            head = ["| script | outcome | ops | samples, stated | on a CPU | CPU s |", "|---|---|---:|---|---|---:|"]
            options.out.write_text(
                "\n".join([*head, *map(trial_row, trials), "", sum_up(trials), ""]), encoding="utf-8"
            )
    print(sum_up(trials))
    return 1 if any(trial.outcome == "raw" for trial in trials) else 0


def try_cases(folder: Path, options: argparse.Namespace) -> int:
    """Captures and predicts the small programs of a folder; a line each: ms on three GPUs, or what is wrong."""
    import traincast.capturing  # noqa: F401  # once for all, as above

    faults = 0
    for case in CASES:
        if options.only and not any(words.lower() in case for words in options.only):
            continue
        answer = try_case(folder, case)
        fault = find_fault(case, answer)
        faults += bool(fault)
        times = ", ".join(f"{gpu} {found:.3g} ms" for gpu, found in answer.milliseconds.items())
        print(f"{'WRONG' if fault else 'right':6} {case}: {fault or times or 'refused'}", flush=True)
    print(f"{faults} wrong without a word")
    return 1 if faults else 0


def describe_trial(trial: Trial) -> str:
    """One script in a line."""
    samples = "" if trial.samples_agree else f" {trial.samples:g} samples instead of {trial.stated:g}"
    compared = "" if trial.differences is None else f"; against a CPU: {trial.differences[:2] or 'the same ops'}"
    numbers = f"{trial.outcome:9} {trial.seconds:6.1f} s {trial.ops:6} ops"
    return f"{numbers}  {trial.name}{samples}  {plain(trial.why)}{compared}"


def trial_row(trial: Trial) -> str:
    said = f"{trial.outcome}: {plain(trial.why)}" if trial.why else trial.outcome
    stated = f"{trial.samples:g}, {trial.stated or '-'}" if trial.ops else ""
    beside = "" if trial.differences is None else "other ops" if trial.differences else "same ops"
    return f"| {trial.name} | {said} | {trial.ops or ''} | {stated} | {beside} | {trial.cpu_seconds:.1f} |"


def sum_up(trials: list[Trial]) -> str:
    """How many came out how, and how long they took."""
    counts = Counter(trial.outcome for trial in trials)
    captured = [trial for trial in trials if trial.ops]
    agree = sum(trial.samples_agree for trial in captured if trial.stated)
    stated = sum(bool(trial.stated) for trial in captured)
    seconds = sorted(trial.cpu_seconds for trial in captured) or [0.0]
    kinds = ", ".join(f"{number} {kind}" for kind, number in counts.most_common())
    compared = [trial for trial in trials if trial.differences is not None]
    beside = f"; the ops of a real run on a CPU in {sum(not t.differences for t in compared)} of {len(compared)}"
    return (
        f"{len(captured)} of {len(trials) - counts['absent']} captured ({kinds}); samples of an update as the script "
        f"has them in {agree} of {stated}; median {seconds[len(seconds) // 2]:.1f} s of CPU, PyTorch loaded"
        f"{beside * bool(compared)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--against-cpu", action="store_true")
    parser.add_argument("--one-size", action="store_true")
    parser.add_argument("--public", type=Path, metavar="DIR")
    parser.add_argument("--work", type=Path, metavar="DIR")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--limit", type=float, default=240.0, metavar="SECONDS")
    parser.add_argument("--cases", type=Path, metavar="DIR")
    options = parser.parse_args()
    if options.cases is not None:
        return try_cases(options.cases, options)
    if options.public is not None:
        with tempfile.TemporaryDirectory() as folder:
            return try_public(options.public, options.work or Path(folder), options)
    counts: Counter[str] = Counter()
    rows: list[str] = []
    wrong = 0
    for setup in load().values():
        if options.only and not any(words.lower() in setup.name.lower() for words in options.only):
            continue
        outcome = run(setup, rebatch=not options.one_size)
        wrong += outcome.state not in ("works", "skipped") and not (setup.refused and setup.refused in outcome.why)
        counts[outcome.state] += 1
        print(
            f"{outcome.state:8} {outcome.seconds:5.1f} s {outcome.ops:6} ops  {setup.name}  {outcome.why}", flush=True
        )
        compare = options.against_cpu and not setup.gpus and outcome.state == "works"
        rows.append(row(setup, outcome, compared(setup) if compare else ""))
        if options.out:
            write(options.out, rows, counts)  # each time: a long run that is stopped leaves what it has found
    print(summary(counts))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
