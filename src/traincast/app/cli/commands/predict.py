"""How long one step of a workload takes on a platform, and why.

WORKLOAD is a built-in model (see 'traincast models'), a workload saved by 'traincast capture' (.tc), a DLRM or
Transformer described in YAML, or a set of embedding tables with '--plan'. PLATFORM is a built-in GPU or node (see
'traincast platforms') or your own description (.toml). 'here' is this machine, and a profile of 'traincast fit --store'
(.toml) the machine it was measured on: a CPU, one thread. WORKLOAD may then be FILE.py:FUNCTION too, and '--gpus 2' is
two processes that train together over gloo.
Batch size is per GPU. Training is forward, backward and optimizer step; '--optimizer none' leaves the step out.

'--gpus 16' predicts data-parallel training (DistributedDataParallel) on 16 GPUs, on as many nodes as hold them; a DLRM
shards its tables instead.
'--gpus 1,2,4,8' gives a scaling curve: weak (the default) keeps the batch of a GPU, with '--scaling strong'
'--batch-size' is the batch of all GPUs together. Workloads captured on several GPUs run on those.

A DLRM on several GPUs is TorchRec's program; '--program' picks another. '--cuda-graph' replays the step as CUDA graphs
and says what breaks them. '--loader-ms 8 --workers 4' lets a data loader hold the step up.

A Transformer by its description (llama3-8b, a short YAML, a Hugging Face config.json) is distributed over GPUs by --tp,
--pp,
--cp, --ep, --fsdp, --zero and their like; what is left of the GPUs is data parallel. Its arithmetic is bf16 by default.

'--file SCENARIO.yaml' has fields by the names of options ('workload: dlrm-v2'). An option that the step does not use is
an error. The settings that were used, defaults included, are printed with the result.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from traincast.app.cli.arguments import (
    PLATFORM_HELP,
    WORKLOAD_HELP,
    add_scenario_file,
    add_scenario_options,
    parse_gpu_numbers,
    parse_path,
    read_scenario_values,
    require_question,
)
from traincast.app.cli.output import check_outputs, name_options, print_json, print_text, show_progress_line
from traincast.app.cli.registry import CHECK_FAILED, OK
from traincast.app.predicting import check_gpu, predict
from traincast.app.report.prediction import format_prediction
from traincast.simulator.prediction.breakdown import PLACES
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.scenario.resolved import make_scenario
from traincast.simulator.scenario.scaling import SCALINGS, ScalingCurve
from traincast.utils.errors import TraincastError
from traincast.utils.files.writing import write_json

if TYPE_CHECKING:
    from traincast.ir.workload import Workload
    from traincast.planner.what_if.money import Cost


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("workload", metavar="WORKLOAD", nargs="?", help=WORKLOAD_HELP)
    parser.add_argument("--on", metavar="PLATFORM", help=PLATFORM_HELP)
    add_scenario_file(parser)
    parser.add_argument("-v", "--full", action="store_true", help="shows what durations and interval come from too")
    parser.add_argument("--by", choices=PLACES, help="shows kernel time by module, layer or op too")
    parser.add_argument("--must-fit", action="store_true", help="exit with 1 where the step does not fit in memory")
    parser.add_argument(
        "--trace-out", type=parse_path, metavar="FILE", help="timeline for Perfetto (Chrome trace JSON)"
    )
    parser.add_argument(
        "--recapture", action="store_true",
        help="captures a script again where its file does not serve the batch size asked for: runs its code",
    )  # fmt: skip
    parser.add_argument("--price", metavar="PRICE", help="dollars of one GPU for an hour, or 'list': what steps cost")
    add_curve_options(parser)


def add_curve_options(parser: argparse.ArgumentParser) -> None:
    """Fields of a scenario, and the kind of a scaling curve."""
    parser.add_argument("--scaling", choices=SCALINGS, help="a scaling curve of this kind (default weak)")
    add_scenario_options(parser, several_gpus=True)


def run(args: argparse.Namespace) -> int:
    """Predicts and prints."""
    check_outputs(args.trace_out, inputs=[args.workload, args.on, args.file])
    result = predict_asked(args, recaptured=args.recapture)
    if args.by:
        require_one_prediction(result, "--by")
    if args.trace_out:
        from traincast.app.report.chrome import make_chrome_trace

        write_json(args.trace_out, make_chrome_trace(require_one_prediction(result, "--trace-out")))
    cost = _compute_price(args.price, result)
    if args.json:
        print_json(result.to_dict() | ({} if cost is None else {"cost": cost.to_dict()}))
    else:
        text = _format_result(result, args.by, full=args.full)
        print_text(name_options("\n".join([text, *_list_costs(cost)]), args.options))
    if args.must_fit and not require_one_prediction(result, "--must-fit").fits:
        return CHECK_FAILED
    return OK


def _compute_price(price: str | None, result: Prediction | ScalingCurve) -> Cost | None:
    """What a step costs at the price that was given; None without one."""
    if price is None:
        return None
    from traincast.planner.what_if.money import Prices, compute_cost, find_one_price  # most predictions have no price

    step = require_one_prediction(result, "--price")
    dollars = find_one_price(price, step.platform.key, step.platform.device.key)
    return compute_cost(step, Prices(per_gpu_hour=dollars))


def _list_costs(cost: Cost | None) -> list[str]:
    if cost is None:
        return []
    from traincast.app.report.whatif import list_cost_rows

    return [f"{name}: {value}" for name, value in list_cost_rows(cost) if value]


def require_one_prediction(result: Prediction | ScalingCurve, option: str) -> Prediction:
    """The prediction whose timeline an option shows; a curve of several is rejected."""
    if isinstance(result, ScalingCurve):
        raise TraincastError(f"{option} is for one prediction; give one number of --gpus")
    return result


def predict_asked(args: argparse.Namespace, *, recaptured: bool = False) -> Prediction | ScalingCurve:
    """The prediction or the scaling curve that options ask for."""
    values = read_scenario_values(args)
    if recaptured:
        values["workload"] = _capture_again(values)
    require_question(values, "predict")
    numbers = parse_gpu_numbers(args.gpus) if args.gpus is not None else None
    if numbers is not None:
        values["gpus"] = numbers[0]
    if args.scaling is None and (numbers is None or len(numbers) == 1):
        return predict(make_scenario(values))
    from traincast.simulator.scenario.scaling import predict_scaling

    scenario = make_scenario({**values, "gpus": None})
    check_gpu(scenario)
    return predict_scaling(scenario, numbers or [values.get("gpus", 1)], args.scaling or "weak")


def _capture_again(values: dict[str, Any]) -> Workload:
    """The workload of a file that `capture` wrote, captured anew where that does not serve the sizes asked for."""
    from traincast.app.captures import recapture
    from traincast.ir.file import load_workload

    file = str(values.get("workload"))
    if not file.endswith(".tc"):
        raise TraincastError(f"--recapture is for files that capture wrote (.tc), not for {file}")
    with show_progress_line(f"capturing {file} again") as progress, redirect_stdout(sys.stderr):
        return recapture(load_workload(file), values.get("batch_size"), values.get("seq_len"), progress)


def _format_result(result: Prediction | ScalingCurve, by: str | None, *, full: bool) -> str:
    """The result for the terminal."""
    if isinstance(result, ScalingCurve):
        from traincast.app.report.choices import format_scaling

        return format_scaling(result)
    return format_prediction(result, by=by, full=full)
