"""The server under siege: `python -m tests.app.server.siege --minutes 60`; exit code 1 when a promise was broken.

Clients ask quick and slow questions, cancel jobs, send half headers and slow bodies, upload at the limit, above it and
where the disk is full, and kill workers; the system's clock jumps meanwhile. Promised: every job that was taken comes
to an end that is told, no answer is a mistake of the server's own, quick questions are answered within a second on an
idle machine while eight searches run (they begin together, every few minutes), memory does not grow, nothing is left.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

QUICK_SECONDS = 1.0
SLOW = 8  # searches under way at a time
_BURST = 240.0  # seconds from one burst of searches to the next
_UPLOAD_MB, _DISK_MB = 4, 3  # the largest upload, and the largest file that the disk takes
_GROWTH = 1.35  # of memory from a third of the time to the end
_START = f"""
import random, resource, signal, sys, time
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({_DISK_MB << 20}, {_DISK_MB << 20}))
real, draw = time.time, random.Random(1)
time.time = lambda: real() + draw.choice((0, 0, -86400 * 400, 86400 * 400))  # a clock that jumps
from traincast.app.cli.main import main
sys.exit(main(["serve", "--port", "0", "--upload-mb", "{_UPLOAD_MB}"]))
"""
_KILLED = "the process that worked on it ended"
_STATUSES = (200, 201, 202, 204, 400, 404, 405, 408, 409, 413, 415, 422, 429, 507)


class Siege:
    """A server and what was seen of it."""

    def __init__(self, folder: Path, seed: int) -> None:
        environment = {**os.environ, "TMPDIR": str(folder)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
            start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        found = re.search(r"127\.0\.0\.1:(\d+)", self.process.stdout.readline())
        assert found is not None, "the server did not start"
        self.port, self.folder, self.seed = int(found[1]), folder, seed
        self.lock, self.counts, self.problems = threading.Lock(), Counter[str](), Counter[str]()
        self.quick: list[tuple[float, int]] = []
        self.memory: list[tuple[float, int, int]] = []
        self.loads: list[float] = []
        self.searching = 0
        self.killed = 0
        self.start, self.end = time.monotonic(), 0.0

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        """The status of a request and its result."""
        asked = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            asked.request(method, path, body, headers={name.replace("_", "-"): text for name, text in headers.items()})
            result = asked.getresponse()
            data = result.read()
        finally:
            asked.close()
        with self.lock:
            self.counts[f"{method} {path.partition('?')[0].split('/')[2] if '/api/' in path else '/'}"] += 1
            if result.status not in _STATUSES:
                self.problems[f"status {result.status} of {method} {path[:60]}: {data[:80]!r}"] += 1
        return result.status, data

    def tree(self) -> list[int]:
        """The server and all that it started."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    if int(fields[3]) == self.process.pid and fields[0] != "Z":
                        found.append(int(entry.name))
        return found

    def workers(self) -> list[int]:
        """Processes that answer: children of the process that forks them."""
        tree = self.tree()
        found = []
        for number in tree:
            with contextlib.suppress(OSError):
                parent = int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])
                if parent in tree and parent != self.process.pid:
                    found.append(number)
        return found

    def watch(self) -> None:
        """Memory of the server's own process and how many there are, now and then."""
        while time.monotonic() < self.end:
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{self.process.pid}/status").read_text()
                size = int(re.search(r"VmRSS:\s+(\d+)", text)[1])  # type: ignore[index]
                self.memory.append((time.monotonic(), size, len(self.tree())))
            self.loads.append(os.getloadavg()[0])
            time.sleep(5)

    def broken(self, what: str) -> None:
        """Notes what may not be."""
        with self.lock:
            self.problems[what] += 1


def quick_client(siege: Siege, rng: random.Random) -> None:
    """Asks what is answered at once, each time something new."""
    while time.monotonic() < siege.end:
        batch, on = rng.randrange(1, 1 << 20), rng.choice(("v100", "h100", "a100-80gb"))
        start, searching = time.monotonic(), siege.searching
        status, data = siege.ask("GET", f"/api/answer?workload=dlrm-ddp&on={on}&batch_size={batch}")
        took = time.monotonic() - start
        if status == 200:
            siege.quick.append((took, min(searching, siege.searching)))
            if json.loads(data)["iteration_ms"] <= 0:
                siege.broken("a step that takes no time")
        elif status != 202:
            siege.broken(f"a quick question was refused: {status} {data[:80]!r}")
        time.sleep(rng.uniform(1, 6))


def slow_client(siege: Siege, rng: random.Random) -> None:
    """Searches; some are cancelled, and all come to an end."""
    while time.monotonic() < siege.end:
        gpus, batch = rng.choice((16, 32, 64)), rng.choice((64, 128, 256, 512)) * rng.randrange(1, 40)
        question = {"of": "plan", "workload": "mpt-1b", "on": "dgx-a100", "gpus": [gpus], "global_batch": batch}
        status, data = siege.ask("POST", "/api/jobs", json.dumps(question).encode(), content_type="application/json")
        if status == 429:
            time.sleep(2)
            continue
        if status != 202:
            siege.broken(f"a search was refused: {status} {data[:100]!r}")
            return
        key = json.loads(data)["id"]
        cancel = time.monotonic() + rng.uniform(1, 40) if rng.random() < 0.4 else None
        siege.searching += 1
        try:
            cancelled = _follow(siege, key, cancel)
        finally:
            siege.searching -= 1
        if cancelled:  # another one at once: eight are under way until the first has finished
            continue
        time.sleep(max(0.0, min(_BURST - (time.monotonic() - siege.start) % _BURST, siege.end - time.monotonic())))


def _follow(siege: Siege, key: str, cancel: float | None) -> bool:
    """A job until its end, and whether it was cancelled; it may not be forgotten, nor fail by itself."""
    while time.monotonic() < siege.end:
        if cancel is not None and time.monotonic() > cancel:
            siege.ask("DELETE", f"/api/jobs/{key}")
            cancel = None
        status, data = siege.ask("GET", f"/api/jobs/{key}")
        if status != 200:
            siege.broken(f"a job was lost: {status} {data[:80]!r}")
            return False
        job = json.loads(data)
        with siege.lock:
            siege.counts[f"job {job['status']}"] += job["status"] in ("finished", "failed", "cancelled")
        if job["status"] == "failed" and _KILLED in str(
            job.get("error")
        ):  # its process was ended twice: told, not lost
            with siege.lock:
                siege.counts["job killed twice"] += 1
        elif job["status"] == "failed":
            siege.broken(f"a job failed: {str(job.get('error'))[:120]}")
        if job["status"] in ("finished", "failed", "cancelled"):
            if job["status"] == "finished" and siege.ask("GET", f"/api/jobs/{key}/result")[0] != 200:
                siege.broken("a finished job has no result")
            return bool(job["status"] == "cancelled")
        time.sleep(2)
    return False


def rude_client(siege: Siege, rng: random.Random) -> None:
    """Half headers, bodies byte by byte, odd questions, uploads of all sizes and kinds."""
    while time.monotonic() < siege.end:
        rng.choice((_send_half, _send_slowly, _ask_oddly, _upload))(siege, rng)
        time.sleep(rng.uniform(1, 8))


def _send_half(siege: Siege, rng: random.Random) -> None:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", siege.port), timeout=60) as client:
        client.sendall(rng.choice((b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"\x16\x03\x01", b"GET " + b"a" * 5000)))
        time.sleep(rng.uniform(0, 5))
    with siege.lock:
        siege.counts["half headers"] += 1


def _send_slowly(siege: Siege, rng: random.Random) -> None:
    head = f"POST /api/uploads?name=a.yaml HTTP/1.1\r\nHost: 127.0.0.1:{siege.port}\r\nContent-Length: 100\r\n"
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", siege.port), timeout=60) as client:
        client.sendall((head + "Content-Type: application/octet-stream\r\n\r\n").encode())
        for _ in range(rng.randrange(12)):
            client.sendall(b"a")
            time.sleep(0.3)
    with siege.lock:
        siege.counts["slow bodies"] += 1


def _ask_oddly(siege: Siege, rng: random.Random) -> None:
    odd = ("/api/answer?workload=%00&on=v100", "/api/answer?workload=dlrm-ddp&on=../../etc/passwd", "/api/jobs/../x",
           "/api/answer?workload=dlrm-ddp&on=v100&batch_size=1e9", "/api/page?workload=resnet50&on=h100&batch_size=4",
           "/api/report?workload=dlrm-ddp&on=v100", "/", "/api/health", "/api/models", "/nowhere")  # fmt: skip
    siege.ask("GET", rng.choice(odd))


def _upload(siege: Siege, rng: random.Random) -> None:
    sound = (
        b"bottom_mlp: [13, 64, 32]\ntop_mlp: [64, 1]\nembedding_dim: 32\nrows_per_table: [1000]\nlookups_per_table: 4\n"
    )
    sizes = {"at the limit": _UPLOAD_MB << 20, "above it": (_UPLOAD_MB << 20) + 1, "disk full": (_DISK_MB << 20) + 9}
    kind = rng.choice(("sound", "sound", "odd", *sizes))
    body = sound if kind == "sound" else rng.randbytes(3000) if kind == "odd" else b"#" * sizes[kind]
    status, data = siege.ask("POST", f"/api/uploads?name=m{rng.randrange(3)}.yaml", body,
                             content_type="application/octet-stream")  # fmt: skip
    wanted = {
        "sound": (201, 429),
        "odd": (422, 429),
        "above it": (413, 507),
        "disk full": (507,),
        "at the limit": (507,),
    }
    if status not in wanted[kind]:
        siege.broken(f"an upload ({kind}) was answered {status}: {data[:80]!r}")
    if status == 201:
        key = json.loads(data)["id"]
        asked = siege.ask("GET", f"/api/answer?workload=upload:{key}&on=v100&batch_size={rng.randrange(1, 9999)}")
        if asked[0] not in (200, 202, 429):
            siege.broken(f"an upload that was taken is not answered: {asked[0]} {asked[1][:80]!r}")


def killer(siege: Siege, rng: random.Random) -> None:
    """Ends a worker now and then; nobody may notice."""
    while time.monotonic() < siege.end:
        time.sleep(rng.uniform(10, 40))
        workers = siege.workers()
        if workers:
            with contextlib.suppress(OSError):
                os.kill(rng.choice(workers), signal.SIGKILL)
                siege.killed += 1


def run_siege(minutes: float, seed: int) -> dict[str, Any]:
    """What was done and what was broken."""
    with tempfile.TemporaryDirectory() as name:
        siege = Siege(Path(name), seed)
        siege.ask("GET", "/api/answer?workload=dlrm-ddp&on=v100")  # until then it is starting
        siege.start = time.monotonic()
        siege.end = siege.start + 60 * minutes
        clients = [quick_client] * 2 + [slow_client] * SLOW + [rude_client] * 3 + [killer]
        threads = [threading.Thread(target=_guarded, args=(client, siege, random.Random(f"{seed} {number}")))
                   for number, client in enumerate(clients)]  # fmt: skip
        threads.append(threading.Thread(target=siege.watch))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        tree = siege.tree()
        siege.process.send_signal(signal.SIGTERM)
        try:
            _, err = siege.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            siege.broken("the server does not end")
            os.killpg(siege.process.pid, signal.SIGKILL)
            _, err = siege.process.communicate()
        time.sleep(3)
        if siege.tree():
            siege.broken(f"{len(siege.tree())} processes are left")
        if len(err) > 10_000:
            siege.broken(f"stderr has {len(err)} characters: {err[-200:]!r}")
        left = [path.name for path in Path(name).iterdir() if path.name.startswith("traincast-")]
        if left:
            siege.broken(f"files are left: {left}")
        return _summarize(siege, minutes, len(tree))


def _guarded(client: Any, siege: Siege, rng: random.Random) -> None:
    """A client; what it cannot do is a finding."""
    while time.monotonic() < siege.end:
        try:
            client(siege, rng)
        except (OSError, http.client.HTTPException) as error:
            siege.broken(f"{client.__name__}: {type(error).__name__}: {error}")
            time.sleep(1)


def _summarize(siege: Siege, minutes: float, processes: int) -> dict[str, Any]:
    third = len(siege.memory) // 3
    sizes = [size for _, size, _ in siege.memory]
    early, late = statistics.median(sizes[third : 2 * third] or [1]), statistics.median(sizes[-third:] or [1])
    if late > _GROWTH * early:
        siege.broken(f"memory grew from {early / 1e3:.0f} to {late / 1e3:.0f} MB")
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}", "minutes": minutes, "requests": sum(
            count for name, count in siege.counts.items() if name.startswith(("GET", "POST", "DELETE"))),
        "counts": dict(siege.counts), "workers_killed": siege.killed, "processes": processes,
        "quick": _describe_times([took for took, _ in siege.quick]),
        "quick_beside_eight": _describe_times([took for took, searching in siege.quick if searching >= SLOW]),
        "server_mb": {"second_third": round(early / 1e3), "last_third": round(late / 1e3)},
        "load": round(statistics.median(siege.loads or [0.0]), 1), "problems": dict(siege.problems),
    }  # fmt: skip


def _describe_times(times: list[float]) -> dict[str, float]:
    """Seconds that questions took, and the share that was answered in time."""
    ordered = sorted(times) or [0.0]
    return {
        "n": len(times), "median_s": round(statistics.median(ordered), 3),
        "p95_s": round(ordered[int(0.95 * len(ordered))], 3), "p99_s": round(ordered[int(0.99 * len(ordered))], 3),
        "worst_s": round(ordered[-1], 3), "within": sum(took <= QUICK_SECONDS for took in ordered) / len(ordered),
    }  # fmt: skip


def main() -> int:
    """Prints what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="where the summary is added as a line")
    args = parser.parse_args()
    summary = run_siege(args.minutes, args.seed)
    print(json.dumps(summary, indent=1))
    if args.log:
        with args.log.open("a") as file:
            file.write(json.dumps(summary) + "\n")
    return int(bool(summary["problems"]))


if __name__ == "__main__":
    sys.exit(main())
