"""The same answers as live pages in a browser, and a REST API.

Opens on this machine alone; '--host 0.0.0.0' lets others in, who then need the token that is printed (or the one in
$TRAINCAST_TOKEN). Traffic is not encrypted: put a proxy with TLS before it in any network you do not trust.

What the page shows is in its address. Uploads and jobs that were taken on are kept in '--keep' over a restart.
The API is described at /api. Needs the extra 'serve'.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from traincast.app.cli.arguments import file_path
from traincast.app.cli.output import print_json, print_text
from traincast.app.cli.signals import Terminated
from traincast.app.cli.verbs import OK
from traincast.utils.errors import TraincastError

if TYPE_CHECKING:
    from traincast.app.server.app import Settings

_MOST_PORT = 65535


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("--host", default="127.0.0.1", metavar="NAME", help="where to listen (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8787, metavar="N", help="default 8787; 0 is any free one")
    parser.add_argument("--keep", type=file_path, metavar="FOLDER", help="where uploads and jobs are kept")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that answer at most (default 8)")
    parser.add_argument("--upload-mb", type=int, metavar="N", help="the largest upload (default 256)")
    parser.add_argument("--perfetto", metavar="URL", help="where Perfetto is (default https://ui.perfetto.dev)")


def run(args: argparse.Namespace) -> int:
    """Serves until it is ended."""
    from traincast.app.server.server import Bound, serve

    def started(bound: Bound) -> None:
        if not bound.loopback:
            print(f"traincast: warning: listening on {args.host}: others can reach this server; they need its token, "
                  "and nothing is encrypted", file=sys.stderr)  # fmt: skip
        if args.json:
            print_json({"url": bound.url, "token": bound.token, "keep": str(bound.folder)})
        else:
            print_text(f"{bound.url}\nuploads and jobs are kept in {bound.folder}; end with Ctrl-C")
        sys.stdout.flush()

    try:
        serve(_settings(args), host=args.host, port=args.port, started=started,
              token=os.environ.get("TRAINCAST_TOKEN"))  # fmt: skip
    except (KeyboardInterrupt, Terminated):
        return OK  # how every server ends
    return OK


def _settings(args: argparse.Namespace) -> Settings:
    from traincast.app.server.app import Settings
    from traincast.app.server.pool import Limits
    from traincast.app.server.server import state_folder
    from traincast.app.server.store import Room

    for name, value, most in (("port", args.port, _MOST_PORT), ("workers", args.workers, 256),
                              ("upload_mb", args.upload_mb, 1 << 20)):  # fmt: skip
        if value is not None and not (0 if name == "port" else 1) <= value <= most:
            raise TraincastError(f"`{name}` {value} is out of range; give at most {most}")
    if args.perfetto is not None and not args.perfetto.startswith(("https://", "http://")):
        raise TraincastError("`perfetto`: give an address that begins with https://")
    limits = Limits() if args.workers is None else Limits(least=min(2, args.workers), most=args.workers)
    room = Room() if args.upload_mb is None else Room(upload=args.upload_mb << 20)
    more = {} if args.perfetto is None else {"perfetto": args.perfetto.rstrip("/")}
    return Settings(folder=args.keep or state_folder(), limits=limits, room=room, **more)
