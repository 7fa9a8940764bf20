"""The same results as live pages in a browser, and a REST API.

Opens on this machine alone; to reach it from elsewhere forward its port ('ssh -L'). What the page shows is in its
address. Uploads are kept until the server ends. The API is described at /api. Needs the extra 'serve'.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from traincast.app.cli.main import Terminated
from traincast.app.cli.output import print_json, print_text
from traincast.app.cli.registry import OK
from traincast.utils.errors import TraincastError

if TYPE_CHECKING:
    from traincast.app.server.server import Settings

_MOST_PORT = 65535


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("--host", default="127.0.0.1", metavar="NAME", help="a name of this machine (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8787, metavar="N", help="default 8787; 0 is any free one")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that result at most (default 8)")
    parser.add_argument("--upload-mb", type=int, metavar="N", help="the largest upload (default 256)")
    parser.add_argument("--perfetto", metavar="URL", help="where Perfetto is (default https://ui.perfetto.dev)")


def run(args: argparse.Namespace) -> int:
    """Serves until it is ended."""
    from traincast.app.server.server import serve

    def started(url: str) -> None:
        if args.json:
            print_json({"url": url})
        else:
            print_text(f"{url}\nuploads are kept until the server ends; end it with Ctrl-C")
        sys.stdout.flush()

    try:
        serve(_read_settings(args), host=args.host, port=args.port, started=started)
    except (KeyboardInterrupt, Terminated):
        return OK  # how every server ends
    return OK


def _read_settings(args: argparse.Namespace) -> Settings:
    from traincast.app.server.guard import UploadLimits
    from traincast.app.server.jobs import Limits
    from traincast.app.server.server import Settings

    for name, value, least, most in (("port", args.port, 0, _MOST_PORT), ("workers", args.workers, 2, 256),
                                     ("upload_mb", args.upload_mb, 1, 1 << 20)):  # fmt: skip
        if value is not None and not least <= value <= most:
            raise TraincastError(f"`{name}` {value} is out of range; give {least} to {most}")
    if args.perfetto is not None and not args.perfetto.startswith(("https://", "http://")):
        raise TraincastError("`perfetto`: give an address that begins with https://")
    quick = Limits.quick if args.workers is None else min(Limits.quick, args.workers - 1)
    limits = Limits() if args.workers is None else Limits(quick=quick, long=args.workers - quick)
    uploads = UploadLimits() if args.upload_mb is None else UploadLimits(most_bytes=args.upload_mb << 20)
    more = {} if args.perfetto is None else {"perfetto": args.perfetto.rstrip("/")}
    return Settings(limits=limits, uploads=uploads, **more)
