"""Results as tools for coding agents (Model Context Protocol): the verdict as text, then the figures that decide."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from traincast.app import api
from traincast.app.report.compared import state_traces
from traincast.simulator.prediction.result import Prediction, state_verdict
from traincast.utils.errors import TraincastError
from traincast.utils.version import __version__

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

Fields = dict[str, Any]
"""Fields of a scenario by name: batch_size, seq_len, gpus, dtype, fsdp, tp, ..."""
_FIGURES = (
    "iteration_ms", "interval_ms", "device_active_ms", "device_idle_ms", "exposed_comm_ms", "per_family",
    "critical_path", "memory_gb", "fits", "trust", "samples_per_s", "tokens_per_s", "mfu", "warnings", "scenario",
)  # fmt: skip
_INSTRUCTIONS = (
    "Predicts how long one training step takes on a GPU that is not there, and why. 'models' and 'platforms' list the "
    "names. `fields` are those of a scenario: batch_size (per GPU), seq_len, gpus, dtype, optimizer, compiled, fsdp, "
    "tp, pp, checkpoint, ... A field that a step does not use is an error that says so. Times are milliseconds."
)


def predict(workload: str, on: str, fields: Fields | None = None) -> Fields:
    """How long one training step of a model (a name, .tc, .yaml or config.json) takes on a GPU or node, and why."""
    return _summarise(api.predict(workload, on=on, **_take_fields(fields)))


def compare(workload: str, on: list[str], price: str | None = None, fields: Fields | None = None) -> Fields:
    """The same step on several GPUs: time, memory, dollars, trust. `price`: "2.5" or "h100=2.5,..." per GPU hour."""
    result = api.compare(workload, on=on, price=price, **_take_fields(fields, "price"))
    return {"verdict": result.headline(), **result.to_dict()}


def fits(workload: str, on: str, max: str | None = None, fields: Fields | None = None) -> Fields:
    """Whether a step fits in the memory of its GPUs, what fills it and what would help. `max`: "batch-size" or
    "seq-len", of which the largest that fits is searched."""
    result = api.fits(workload, on=on, max=max, **_take_fields(fields, "max"))
    return {"verdict": result.headline(), **result.to_dict()}


def plan(workload: str, on: str, gpus: int, fields: Fields | None = None) -> Fields:
    """How to lay a Transformer out over GPUs: the fastest layouts that fit, each with the command that predicts it."""
    result = api.plan(workload, on=on, gpus=gpus, **_take_fields(fields, "gpus"))
    rows = [{k: v for k, v in result.row(n).items() if k != "prediction"} for n in range(len(result.best))]
    return {"verdict": result.headline(), "layouts": rows}


def shard(tables: str, on: str, gpus: int, batch_size: int = 2048) -> Fields:
    """Where embedding tables go: the plan with the fastest step on the GPUs of a node."""
    result = api.shard(tables, on=on, gpus=gpus, batch_size=batch_size, torchrec=False)
    return {"verdict": result.headline(), "plan": result.to_dict()["plan"]}


def whatif(workload: str, on: str, edits: list[str], fields: Fields | None = None) -> Fields:
    """What a change would bring: edits such as "batch-size=4096", "dtype=bf16", "cuda-graph", "on=h100"."""
    result = api.whatif(workload, on=on, edits=edits, **_take_fields(fields, "edits"))
    return {"verdict": result.headline(), "before": _summarise(result.before), "after": _summarise(result.after)}


def trace(path: str) -> Fields:
    """What measured Kineto traces (a file or a folder of ranks) say: the step, what holds it, what would help."""
    report = api.trace(path)
    ranks = [{"rank": r.rank, "step_ms": 1e3 * r.median_step.step, "critical_path": r.path.by_op} for r in report.ranks]
    return {"verdict": state_traces(report), "ranks": ranks}


def models(text: str = "") -> list[Fields]:
    """The models and table sets that have a name, those with a text in it only."""
    return api.list_models().select(text).to_dict()


def platforms(text: str = "") -> list[Fields]:
    """The GPUs and nodes that have a name, with what was measured on them."""
    return api.list_platforms().select(text).to_dict()


TOOLS: tuple[Callable[..., Any], ...] = (predict, compare, fits, plan, shard, whatif, trace, models, platforms)
"""What agents can call."""


def make_server() -> MCPServer:
    """The server, with a tool per call; mistakes come back as text that names the remedy."""
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    def answer_or_explain(tool: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(tool)
        def call(*args: Any, **fields: Any) -> Any:
            try:
                return tool(*args, **fields)
            except TraincastError as error:
                raise ToolError(str(error)) from None

        return call

    server = MCPServer("traincast", instructions=_INSTRUCTIONS, version=__version__)
    for tool in TOOLS:
        server.add_tool(answer_or_explain(tool))
    return server


def _take_fields(fields: Fields | None, *arguments: str) -> Fields:
    """The fields of a scenario, none of them what the tool has as an argument of its own."""
    for name in ("workload", "on", *arguments):
        if name in (fields or {}):
            raise TraincastError(f"`{name}` is an argument of the tool and no field; give it once, beside `fields`")
    return fields or {}


def _summarise(result: Prediction) -> Fields:
    """The verdict and the figures of a prediction that decide."""
    if not isinstance(result, Prediction):
        raise TraincastError("give one number of `gpus`")
    document = result.to_dict()
    return {"verdict": list(state_verdict(result)), **{name: document[name] for name in _FIGURES}}
