"""How long one step of a workload takes on a platform, and why.

WORKLOAD is a built-in model (see 'traincast models'), a workload saved by 'traincast capture' (.tc), or a DLRM
described in YAML. PLATFORM is a built-in GPU or node (see 'traincast platforms') or your own description (.toml).
Batch size is per GPU. Training is forward, backward and optimizer step; '--optimizer none' leaves the step out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from traincast.api import DTYPES, MODES, OPTIMIZERS, predict
from traincast.cli.output import print_json, print_text, write_json_file
from traincast.report.chrome import chrome_trace
from traincast.report.prediction import prediction_json, prediction_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("workload", metavar="WORKLOAD")
    parser.add_argument("--on", metavar="PLATFORM", required=True)
    parser.add_argument("--batch-size", type=int, metavar="N", help="samples per GPU")
    parser.add_argument("--seq-len", type=int, metavar="N", help="tokens per sample (Transformers)")
    parser.add_argument("--gpus", type=int, default=1, metavar="N")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("--optimizer", choices=OPTIMIZERS)
    parser.add_argument("--attention", choices=("eager", "sdpa"), help="Transformers; default eager")
    parser.add_argument("--embedding", choices=("batched", "bag", "fbgemm"), help="DLRMs; default batched")
    parser.add_argument("--clock-mhz", type=float, metavar="N", help="locked SM clock")
    parser.add_argument("--host", metavar="PROFILE", help="host profile (default: the platform's)")
    parser.add_argument("--trace-out", type=Path, metavar="FILE", help="timeline for Perfetto (Chrome trace JSON)")


def run(args: argparse.Namespace) -> int:
    """Predicts and prints."""
    answer = predict(
        args.workload,
        on=args.on,
        batch_size=args.batch_size,
        seq_len=args.seq_len,
        gpus=args.gpus,
        dtype=args.dtype,
        mode=args.mode,
        optimizer=args.optimizer,
        attention=args.attention,
        embedding=args.embedding,
        clock_mhz=args.clock_mhz,
        host=args.host,
    )
    if args.trace_out:
        write_json_file(args.trace_out, chrome_trace(answer.timeline))
    if args.json:
        print_json(prediction_json(answer))
    else:
        print_text(prediction_text(answer))
    return 0
