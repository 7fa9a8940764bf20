"""How fast traces are read, as ratios to peers in the same minutes.

    .venv/bin/python benchmarks/ingest.py TRACE.json.gz [...] [--hta PYTHON]

Against `orjson.loads` of the same bytes (goal: at most 4), against HolisticTraceAnalysis loading the same file (time at
most 0.1, peak memory at most 0.25; `--hta` is a Python with HolisticTraceAnalysis and pandas<3), and peak memory of a
trace of 20 copies against one (goal: 0.8 to 1.2). Each figure is the median of interleaved fresh processes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

# the kernel's own high-water mark: getrusage would count what the parent held before it started the child
_TAIL = """
seconds = time.perf_counter() - start
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(seconds, int(status["VmHWM"].split()[0]) / 1024)
"""
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
    arguments = parser.parse_args()
    print(json.dumps([ratios(trace, arguments.hta, arguments.repeats) for trace in arguments.traces], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
