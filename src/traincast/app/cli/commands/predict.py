"""How long one step of a workload takes on a platform, and why.

WORKLOAD is a built-in model (see 'traincast models'), a workload saved by 'traincast capture' (.tc), or a DLRM
described in YAML. PLATFORM is a built-in GPU or node (see 'traincast platforms') or your own description (.toml).
'here' is this machine, and a profile of 'traincast fit --store' (.toml) the machine it was measured on: a CPU, one
thread. WORKLOAD may then be FILE.py:FUNCTION too, and '--gpus 2' is two processes that train together over gloo.
Batch size is per GPU. Training is forward, backward and optimizer step; '--optimizer none' leaves the step out.

'--gpus 16' predicts data-parallel training (DistributedDataParallel) on 16 GPUs, on as many nodes as hold them; a DLRM
shards its tables instead.
'--gpus 1,2,4,8' gives a scaling curve: weak (the default) keeps the batch of a GPU, with '--scaling strong'
'--batch-size' is the batch of all GPUs together. Workloads captured on several GPUs run on those.

A DLRM on several GPUs is TorchRec's program; '--program' picks another. '--cuda-graph' replays the step as CUDA graphs
and says what breaks them. '--loader-ms 8 --workers 4' lets a data loader hold the step up.

A Transformer by its description (llama3-8b, a short YAML, a Hugging Face config.json) is laid over GPUs by --tp, --pp,
--cp, --ep, --fsdp, --zero and their like; what is left of the GPUs is data parallel. Its arithmetic is bf16 by default.
"""

from __future__ import annotations

import argparse

from traincast.app.api import predict, predict_here, predict_training, scaling
from traincast.app.cli.arguments import file_path, variant_options, whole_numbers
from traincast.app.cli.layouts import add_layout_arguments, has_layout, layout_of
from traincast.app.cli.options import in_options
from traincast.app.cli.output import check_outputs, print_json, print_text
from traincast.app.cli.verbs import OK
from traincast.app.report.chrome import chrome_trace
from traincast.app.report.prediction import prediction_text
from traincast.costs.cpu.machine import is_here
from traincast.simulator.parallelism.result import TrainingPrediction
from traincast.simulator.prediction.places import PLACES
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.prediction.scaling import SCALINGS, ScalingCurve
from traincast.simulator.scenario.loading import Loader
from traincast.simulator.scenario.programs import PROGRAMS
from traincast.simulator.scenario.variant import ATTENTIONS, DTYPES, EMBEDDINGS, MODES, OPTIMIZERS
from traincast.simulator.scenario.workloads import is_transformer
from traincast.simulator.uneven import Unevenness
from traincast.utils.errors import TraincastError
from traincast.utils.files.writing import write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("workload", metavar="WORKLOAD")
    parser.add_argument("--on", metavar="PLATFORM", required=True)
    add_prediction_options(parser)
    parser.add_argument("--by", choices=PLACES, help="shows kernel time by module, layer or op too")
    parser.add_argument("--trace-out", type=file_path, metavar="FILE", help="timeline for Perfetto (Chrome trace JSON)")
    add_layout_arguments(parser)


def add_prediction_options(parser: argparse.ArgumentParser) -> None:
    """Options that say what is to be predicted."""
    parser.add_argument("--batch-size", type=int, metavar="N", help="samples per GPU")
    parser.add_argument("--seq-len", type=int, metavar="N", help="tokens per sample (Transformers)")
    parser.add_argument("--gpus", metavar="N[,N...]", help="how many GPUs; several numbers give a scaling curve")
    parser.add_argument("--scaling", choices=SCALINGS, help="a scaling curve of this kind (default weak)")
    parser.add_argument("--dtype", choices=(*DTYPES, "fp8"), help="default fp32; bf16 of described Transformers")
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("--optimizer", choices=OPTIMIZERS)
    parser.add_argument("--attention", choices=ATTENTIONS, help="Transformers; default eager")
    parser.add_argument("--embedding", choices=EMBEDDINGS, help="DLRMs; default batched")
    parser.add_argument("--compiled", action="store_true", help="as torch.compile(model) would run it")
    parser.add_argument("--program", choices=PROGRAMS, help="what trains a DLRM on several GPUs; default torchrec")
    parser.add_argument("--cuda-graph", action="store_true", help="the step replayed as CUDA graphs")
    parser.add_argument("--loader-ms", type=float, default=0.0, metavar="N", help="what a worker takes for a batch")
    parser.add_argument(
        "--workers", type=int, default=0, metavar="N", help="of the data loader; 0: in the training loop"
    )
    parser.add_argument("--pageable", action="store_true", help="inputs are copied from pageable memory")
    parser.add_argument("--costs", metavar="FILE", help="what ops of your own cost (.toml)")
    parser.add_argument("--clock-mhz", type=float, metavar="N", help="locked SM clock")
    parser.add_argument("--host", metavar="PROFILE", help="host profile (default: the platform's)")
    parser.add_argument("--skew-ms", type=float, default=0.0, metavar="N", help="ranks begin up to N ms late at random")
    parser.add_argument("--jitter", type=float, default=0.0, metavar="X", help="ranks take longer by a share at random")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of --skew-ms and --jitter")


def run(args: argparse.Namespace) -> int:
    """Predicts and prints."""
    check_outputs(args.trace_out, inputs=[args.workload, args.on])
    answer = answered(args)
    if args.trace_out:
        assert isinstance(answer, Prediction), "other answers have refused a timeline"
        write_json(args.trace_out, chrome_trace(answer))
    if args.json:
        print_json(answer.to_dict())
    else:
        print_text(in_options(_text(answer, args.by), args.options))
    return OK


Answer = Prediction | ScalingCurve | TrainingPrediction
"""What the options may ask for."""


def answered(args: argparse.Namespace) -> Answer:
    """The prediction, scaling curve, laid-out Transformer or step on this machine that the options ask for."""
    if is_here(args.on):
        return _here(args)
    gpus = None if args.gpus is None else whole_numbers("--gpus", args.gpus)
    if has_layout(args) or (gpus and gpus[-1] > 1 and is_transformer(args.workload)):
        return _laid_out(args, gpus or [1])
    uneven = None
    if args.skew_ms or args.jitter:
        uneven = Unevenness(skew_ms=args.skew_ms, jitter=args.jitter, seed=args.seed)
    if args.scaling or (gpus and len(gpus) > 1):
        if uneven:
            raise TraincastError("--skew-ms and --jitter are for one prediction; give one number of --gpus")
        return _curve(args, gpus or [1])
    return predict(
        args.workload,
        on=args.on,
        gpus=gpus[0] if gpus else None,
        clock_mhz=args.clock_mhz,
        host=args.host,
        uneven=uneven,
        program=args.program,
        cuda_graph=args.cuda_graph,
        loader=loader_of(args),
        costs=args.costs,
        **variant_options(args),
    )


def _text(answer: Answer, by: str | None) -> str:
    """The answer for the terminal."""
    if isinstance(answer, Prediction):
        return prediction_text(answer, by=by)
    if isinstance(answer, ScalingCurve):
        from traincast.app.report.scaling import scaling_text

        return scaling_text(answer)
    from traincast.app.report.training import training_text

    return training_text(answer)


def loader_of(args: argparse.Namespace) -> Loader | None:
    """How batches come, where the options say so."""
    loader = Loader(ms=args.loader_ms, workers=args.workers, pageable=args.pageable)
    return None if loader == Loader() else loader


def _here(args: argparse.Namespace) -> Prediction:
    for option in ("scaling", "clock_mhz", "host", "compiled"):
        if getattr(args, option, None):
            raise TraincastError(f"--{option.replace('_', '-')} is for GPUs; leave it out with '--on {args.on}'")
    gpus = None if args.gpus is None else whole_numbers("--gpus", args.gpus)
    if gpus and len(gpus) > 1:
        raise TraincastError(f"--gpus {args.gpus}: give one number of ranks with '--on {args.on}'")
    return predict_here(args.workload, on=args.on, gpus=gpus[0] if gpus else None, **variant_options(args))


def _curve(args: argparse.Namespace, gpus: list[int]) -> ScalingCurve:
    if getattr(args, "trace_out", None):
        raise TraincastError("--trace-out writes the timeline of one prediction; give one number of --gpus")
    if getattr(args, "by", None):
        raise TraincastError("--by shows the kernel time of one prediction; give one number of --gpus")
    if loader_of(args):
        raise TraincastError("--loader-ms, --workers and --pageable are for one prediction; give one number of --gpus")
    return scaling(
        args.workload,
        on=args.on,
        gpus=gpus,
        kind=args.scaling or "weak",
        clock_mhz=args.clock_mhz,
        host=args.host,
        program=args.program,
        cuda_graph=args.cuda_graph,
        **variant_options(args),
    )


def _laid_out(args: argparse.Namespace, gpus: list[int]) -> TrainingPrediction:
    """A Transformer laid over GPUs."""
    if len(gpus) > 1 or args.scaling:
        raise TraincastError("a layout is for one number of GPUs; give one number of --gpus")
    for option in ("trace_out", "embedding", "skew_ms", "jitter", "by"):
        if getattr(args, option, None):
            raise TraincastError(f"--{option.replace('_', '-')} does not go with a layout of GPUs; leave it out")
    if loader_of(args) or args.program:
        raise TraincastError("data loaders and --program do not go with a layout of GPUs; leave them out")
    if args.mode == "inference":
        raise TraincastError("--mode inference has no layout of GPUs; leave one of them out")
    return predict_training(
        args.workload, on=args.on, layout=layout_of(args, gpus[0]), clock_mhz=args.clock_mhz, host=args.host
    )
