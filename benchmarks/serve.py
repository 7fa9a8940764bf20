"""How many requests a second `traincast serve` answers, and how late the slowest hundredth is.

    python benchmarks/serve.py [--rate 200] [--seconds 60] [--json]

Starts a real server on a free port, asks each question once, then asks at a steady rate over eight connections, whether
or not earlier answers have come. Most requests are questions asked before; with --fresh N, N a second are questions
that nobody asked before (another batch size of a model). Bars: none failed, p99 at most 10 times the median.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
from typing import Any

QUESTIONS = (
    "answer?workload=dlrm-default&on=v100&batch_size=2048",
    "answer?workload=dlrm-v2&on=dgx-h100&gpus=8",
    "answer?workload=resnet50&on=h100&batch_size=64",
    "page?workload=dlrm-default&on=v100&batch_size=2048",
    "answer?workload=bert-large&on=a100-80gb&dtype=bf16",
    "answer?workload=llama3-8b&on=dgx-h100&gpus=8&tp=2",
)
_CONNECTIONS = 8


class Connection:
    """One connection that is kept open; one request at a time."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.reader: asyncio.StreamReader | None = None

    async def get(self, path: str) -> tuple[int, int]:
        """Status and length of a result."""
        if self.reader is None:
            self.reader, self.writer = await asyncio.open_connection(self.host, self.port, limit=1 << 24)
        self.writer.write(f"GET /api/{path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n\r\n".encode())
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
        )
        await self.reader.readexactly(length)
        return int(head.split()[1]), length


async def asked(host: str, port: int, rate: float, seconds: float, fresh: int) -> dict[str, Any]:
    """Asks at a steady rate; times run from when a request was due, so that waiting for a connection counts."""
    free: asyncio.Queue[Connection] = asyncio.Queue()
    for _ in range(_CONNECTIONS):
        free.put_nowait(Connection(host, port))
    first = Connection(host, port)
    for question in QUESTIONS:
        while (await first.get(question))[0] == 202:
            await asyncio.sleep(0.2)
    late: list[float] = []
    failed: list[int] = []

    async def one(number: int, due: float) -> None:
        connection = await free.get()
        try:
            path = QUESTIONS[number % len(QUESTIONS)]
            if fresh and number % max(int(rate / fresh), 1) == 0:
                path = f"answer?workload=dlrm-default&on=v100&batch_size={10_000 + number}"
            status, _ = await connection.get(path)
            if status != 200:
                failed.append(status)
        except (OSError, asyncio.IncompleteReadError, StopIteration):
            failed.append(0)
            connection = Connection(host, port)
        late.append(time.perf_counter() - due)
        free.put_nowait(connection)

    begin, tasks = time.perf_counter(), []
    for number in range(int(rate * seconds)):
        due = begin + number / rate
        wait = due - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(number, due)))
    await asyncio.gather(*tasks)
    took = time.perf_counter() - begin
    late.sort()
    middle, high = late[len(late) // 2], late[int(0.99 * len(late))]
    return {
        "requests": len(late),
        "failed": len(failed),
        "requests_per_second": len(late) / took,
        "median_ms": 1e3 * middle,
        "p99_ms": 1e3 * high,
        "worst_ms": 1e3 * late[-1],
        "p99_to_median": high / middle,
    }


@contextlib.contextmanager
def server():  # noqa: ANN201
    """A server of its own; yields its port."""
    command = [sys.executable, "-m", "traincast", "serve", "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            text += process.stdout.readline()
        yield int(json.loads(text)["url"].rsplit(":", 1)[1].strip("/"))
    finally:
        process.terminate()
        process.wait(20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--fresh", type=int, default=0, help="of them a second that nobody asked before")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with server() as port:
        result = asyncio.run(asked("127.0.0.1", port, args.rate, args.seconds, args.fresh))
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        tail = f"p99 {result['p99_ms']:.2f} ms ({result['p99_to_median']:.1f} x), worst {result['worst_ms']:.1f} ms"
        print(
            f"{result['requests']:,} requests at {result['requests_per_second']:.0f}/s: {result['failed']} failed, "
            f"median {result['median_ms']:.2f} ms, {tail}"
        )
    return 0 if not result["failed"] and result["p99_to_median"] <= 10 else 1


if __name__ == "__main__":
    raise SystemExit(main())
