"""How fast traces are read and analysed, as ratios to peers in the same minutes.

    .venv/bin/python benchmarks/ingest.py TRACE.json.gz [...] [--hta PYTHON] [--whole MEGABYTES | --breakdown]

Against `orjson.loads` of the same bytes (goal: at most 4), against HolisticTraceAnalysis loading the same file (time at
most 0.1, peak memory at most 0.25; `--hta` is a Python with HolisticTraceAnalysis and pandas<3), and peak memory of a
trace of 20 copies against one (goal: 0.8 to 1.2). Each figure is the median of interleaved fresh processes.

With `--whole` the whole analysis instead, replay, what-ifs and all tables included, of each trace repeated until it has
this many megabytes: against `orjson.loads` of its bytes (goal: at most 3). With `--breakdown` reading, linking and the
breakdown of every step against HTA's load and temporal breakdown, and the whole analysis against the same (goal: at
most 0.2). Here CPU time counts, so that other work on the machine does not.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# the kernel's own high-water mark: getrusage would count what the parent held before it started the child
_TAIL = """
seconds = time.perf_counter() - start
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(seconds, int(status["VmHWM"].split()[0]) / 1024)
"""
_CPU_TAIL = _TAIL.replace("perf_counter", "process_time")
ANALYSE = (
    "import sys, time\nfrom traincast.traces.replay.analysis import analyse_traces\n"
    "from traincast.app.report.measured import format_measured\nstart = time.process_time()\n"
    "format_measured(analyse_traces([sys.argv[1]]))" + _CPU_TAIL
)
BREAK_DOWN = (
    "import sys, time\nfrom traincast.traces.kineto import read_kineto\nfrom traincast.traces.link import link_trace\n"
    "from traincast.traces.breakdown import compute_breakdown\nstart = time.process_time()\n"
    "compute_breakdown(link_trace(read_kineto(sys.argv[1])))" + _CPU_TAIL
)
OURS = (
    "import sys, time\nfrom traincast.traces.kineto import read_kineto\nstart = time.perf_counter()\n"
    "trace = read_kineto(sys.argv[1])" + _TAIL
)
ORJSON = (
    "import sys, time, orjson\ndata = open(sys.argv[1], 'rb').read()\nstart = time.perf_counter()\norjson.loads(data)"
    + _TAIL
)
HTA = (
    """
import sys, time, logging, warnings
logging.disable(logging.CRITICAL); warnings.simplefilter("ignore")
from hta.common.trace import Trace
start = time.perf_counter()
trace = Trace(trace_files={0: sys.argv[1]}, trace_dir="/")
trace.load_traces(use_multiprocessing=False, use_memory_profiling=False)
"""
    + _TAIL
)
HTA_BREAKDOWN = (
    """
import sys, time, logging, warnings
logging.disable(logging.CRITICAL); warnings.simplefilter("ignore")
from hta.trace_analysis import TraceAnalysis
start = time.process_time()
analyzer = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="/")
analyzer.get_temporal_breakdown(visualize=False)
"""
    + _CPU_TAIL
)
CPU_ORJSON = ORJSON.replace("perf_counter", "process_time")
_NUMBERS = ("External id", "external id", "correlation", "Ev Idx", "Sequence number", "Record function id")


def measure(python: str, code: str, path: Path) -> tuple[float, float]:
    done = subprocess.run([python, "-c", code, str(path)], check=True, capture_output=True, text=True)
    seconds, megabytes = map(float, done.stdout.split()[-2:])
    return seconds, megabytes


def copies(source: bytes, times: int, path: Path) -> None:
    """A trace with its events repeated, each copy later than the one before."""
    events = json.loads(source)["traceEvents"]
    timed = [e for e in events if e.get("ph") == "X" and isinstance(e.get("pid"), int)]
    span = max(e["ts"] + e["dur"] for e in timed) - min(e["ts"] for e in timed) + 1000
    with path.open("w", encoding="utf-8") as file:
        file.write('{"schemaVersion": 1, "traceEvents": [\n')
        for copy in range(times):
            for index, event in enumerate(events):
                event = {**event, "ts": event.get("ts", 0) + copy * span}
                file.write((",\n" if copy or index else "") + json.dumps(event))
        file.write("\n]}\n")


def repeated(source: bytes, nbytes: int, path: Path) -> None:
    """A trace as if the run had gone on: copies one after the other, with numbers and steps of their own."""
    document = json.loads(source)
    events = document.pop("traceEvents")
    timed = [e for e in events if e.get("ph") == "X" and isinstance(e.get("pid"), int)]
    span = max(e["ts"] + e["dur"] for e in timed) - min(e["ts"] for e in timed) + 1000
    numbers = [e.get("args", {}).get(name, 0) for e in timed for name in _NUMBERS]
    most = 1 + max(number for number in numbers if isinstance(number, int))
    with path.open("w", encoding="utf-8") as file:
        head = json.dumps(document)[:-1]
        file.write(f'{head}{", " if len(head) > 1 else ""}"traceEvents": [\n')
        copy = 0
        while file.tell() < nbytes:
            for index, event in enumerate(events):
                file.write((",\n" if copy or index else "") + json.dumps(_later(event, copy, span, most)))
            copy += 1
        file.write("\n]}\n")


def _later(event: dict[str, Any], copy: int, span: float, most: int) -> dict[str, Any]:
    args = dict(event.get("args", {}))
    for name in _NUMBERS:
        if isinstance(args.get(name), int) and args[name] > 0:
            args[name] += copy * most
    step = re.fullmatch(r"ProfilerStep#(\d+)", str(event.get("name")))
    name = f"ProfilerStep#{int(step[1]) + 1000 * copy}" if step else event.get("name")
    return {**event, "name": name, "ts": event.get("ts", 0) + copy * span, "args": args}


def whole_ratios(trace: Path, repeats: int, megabytes: int) -> dict[str, object]:
    """The whole analysis of a trace that is repeated to this many megabytes."""
    with tempfile.TemporaryDirectory() as folder:
        data = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
        long = Path(folder) / "long.json"
        repeated(data, megabytes << 20, long)
        ours, loads = [], []
        for _ in range(repeats):
            ours.append(measure(sys.executable, ANALYSE, long))
            loads.append(measure(sys.executable, CPU_ORJSON, long))
        return {
            "trace": trace.name,
            "megabytes": long.stat().st_size >> 20,
            "time / orjson.loads": round(median(ours) / median(loads), 3),
            "memory / orjson.loads": round(median(ours, 1) / median(loads, 1), 3),
            "peak megabytes": round(median(ours, 1)),
        }


def breakdown_ratios(trace: Path, hta: str, repeats: int) -> dict[str, object]:
    """Breaking a trace down, and its whole analysis, against HTA."""
    broken, whole, peer = [], [], []
    for _ in range(repeats):
        broken.append(measure(sys.executable, BREAK_DOWN, trace))
        whole.append(measure(sys.executable, ANALYSE, trace))
        peer.append(measure(hta, HTA_BREAKDOWN, trace))
    return {
        "trace": f"{trace.parent.name}/{trace.name}",
        "HTA seconds": round(median(peer), 2),
        "breakdown / HTA": round(median(broken) / median(peer), 3),
        "whole / HTA": round(median(whole) / median(peer), 3),
    }


def ratios(trace: Path, hta: str | None, repeats: int) -> dict[str, object]:
    ours, loads, peer = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        data = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
        plain, long = Path(folder) / "plain.json", Path(folder) / "long.json"
        plain.write_bytes(data)
        copies(data, 20, long)
        packed = []
        for _ in range(repeats):
            ours.append(measure(sys.executable, OURS, plain))
            loads.append(measure(sys.executable, ORJSON, plain))
            packed.append(measure(sys.executable, OURS, trace))
            if hta:
                peer.append(measure(hta, HTA, trace))
        short = statistics.median(megabytes for _, megabytes in ours)
        row: dict[str, object] = {
            "trace": trace.name,
            "time / orjson.loads": round(median(ours) / median(loads), 3),
            "memory 20x / 1x": round(measure(sys.executable, OURS, long)[1] / short, 3),
        }
        if hta:
            row["time / HTA"] = round(median(packed) / median(peer), 3)
            row["memory / HTA"] = round(median(packed, 1) / median(peer, 1), 3)
    return row


def median(runs: list[tuple[float, float]], which: int = 0) -> float:
    return statistics.median(run[which] for run in runs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--hta", metavar="PYTHON")
    parser.add_argument("--repeats", type=int, default=5)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--whole", type=int, metavar="MEGABYTES")
    what.add_argument("--breakdown", action="store_true")
    arguments = parser.parse_args()
    if arguments.breakdown and not arguments.hta:
        parser.error("--breakdown compares with HolisticTraceAnalysis; give its Python with --hta")
    if arguments.whole or arguments.breakdown:
        rows = [
            whole_ratios(trace, arguments.repeats, arguments.whole)
            if arguments.whole
            else breakdown_ratios(trace, arguments.hta, arguments.repeats)
            for trace in arguments.traces
        ]
        print(json.dumps(rows, indent=2))
        return 0
    print(json.dumps([ratios(trace, arguments.hta, arguments.repeats) for trace in arguments.traces], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
