"""A resolved scenario: read from keywords or a file, names and files loaded once, every field with the value that was
used."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traincast.costs.host.profile import HostProfile, load_host_profile
from traincast.hardware.platform import Platform, add_default_links, load_platform
from traincast.ir.formula import OpCost, read_op_costs
from traincast.ir.workload import Workload
from traincast.simulator.scenario.kinds import KINDS, USED, check_used, choose_step_kind, find_source_kind
from traincast.simulator.scenario.scenario import Scenario, list_scenario_fields
from traincast.simulator.scenario.workloads import get_default_dtype
from traincast.utils.errors import TraincastError, make_unknown_error, shorten_value
from traincast.utils.files.reading import compute_file_digest, format_path, parse_toml, read_document, read_text

if TYPE_CHECKING:
    from traincast.models.dlrm.config import DlrmConfig
    from traincast.models.placement.plan import Plan
    from traincast.models.transformers.description import Transformer
    from traincast.simulator.parallelism.layout import Layout
    from traincast.simulator.prediction.result import Prediction


def make_scenario(values: Mapping[str, Any]) -> Scenario:
    """The scenario that keywords describe; an unknown one is named with the nearest known."""
    known = list_scenario_fields()
    plain: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise make_unknown_error("keyword", name, known, f"Choose from {', '.join(known)}.")
        if value is None:
            continue
        if name == "fsdp" and isinstance(value, bool):
            value = 2 if value else None
        elif name in ("stage_layers", "overlap", "graph_modules") and not isinstance(value, str):
            value = ",".join(str(part) for part in value)
        elif isinstance(value, Path):
            value = str(value)
        plain[name] = value
    return Scenario(**plain)


def read_scenario(path: str | Path, *, also: Iterable[str] = ()) -> dict[str, Any]:
    """The fields of a scenario file (YAML, TOML or JSON) as keywords; `also` are other keys that it may have."""
    content, where = read_document(path), format_path(path)
    known = [*list_scenario_fields(), *also]
    if not isinstance(content, Mapping):
        raise TraincastError(f"{where}: not a scenario; write fields by name, such as `workload: resnet50`")
    values = {str(key).replace("-", "_"): value for key, value in content.items()}
    for name, value in values.items():
        if name not in known:
            names = ", ".join(known)
            raise TraincastError(f"{where}: {make_unknown_error('field', name, known, f'It may have {names}.')}")
        info = list_scenario_fields().get(name)
        if info is not None and info.kind == "text" and not isinstance(value, str | int):
            raise TraincastError(f"{where}: `{name}` {shorten_value(value)}: give text")
    return {name: str(value) if _is_text(name) else value for name, value in values.items()}


def _is_text(name: str) -> bool:
    info = list_scenario_fields().get(name)
    return info is not None and info.kind == "text"


Structural = Callable[[Workload], tuple[Workload, str]]
"""An edit of the ops of a step: the edited workload, and a note on it ("": nothing)."""


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """One step where it runs. `scenario` is what was asked, with its workload (a `.tc` file) and `dtype` filled in;
    `source` is the kind of its workload (see `kinds`); `platform`, `host` (None: the platform's) and `costs` are loaded
    from what it names.

    `dlrm` and `transformer` are descriptions that take the place of the workload once they are edited. `structural`
    edits the ops of the step in this order, before data parallelism where the step is one GPU's; `across` those of all
    ranks. `bucket_mb` is DDP's, `plan` places tables. `op_speed` is how many times as fast the kernels of an op run, by
    its name. `software` names what edits change about who launches kernels: with another one, errors of a release are
    not shared. `content` tells files of one name apart.
    """

    scenario: Scenario
    source: str
    platform: Platform
    host: HostProfile | None = None
    costs: tuple[OpCost, ...] = ()
    dlrm: DlrmConfig | None = None
    transformer: Transformer | None = None
    structural: tuple[tuple[str, Structural], ...] = ()
    across: tuple[tuple[str, Structural], ...] = ()
    bucket_mb: float | None = None
    plan: Plan | None = None
    op_speed: Mapping[str, float] = field(default_factory=dict)
    software: tuple[str, ...] = ()
    content: str = ""

    @property
    def kind(self) -> str:
        """The kind of the step: that of its source, or "parallel"."""
        return choose_step_kind(self.source, self.scenario)

    @property
    def name(self) -> str:
        """What the step is called in messages."""
        source = self.scenario.workload
        return source if isinstance(source, str) else f"workload '{getattr(source, 'name', source)}'"

    @property
    def gpus(self) -> int:
        """How many GPUs the step runs on."""
        source = self.scenario.workload
        held = len(source.ranks) if isinstance(source, Workload) else 1
        return held if self.scenario.gpus is None else self.scenario.gpus

    @property
    def layout(self) -> Layout | None:
        """How a Transformer is laid out over GPUs; None for every other step."""
        if self.kind != "parallel":
            return None
        from traincast.simulator.scenario.layouts import make_layout

        return replace(make_layout(self.scenario), bucket_mb=self.bucket_mb or 0.0)

    def of_dlrm(self) -> DlrmConfig:
        """The description of the recommender, or why there is none."""
        if self.dlrm is not None:
            return self.dlrm
        if self.source != "dlrm":
            raise TraincastError(
                f"{self.name} is {KINDS[self.kind]}, not a description of a DLRM; name a built-in DLRM or describe "
                "one in YAML"
            )
        from traincast.simulator.scenario.dlrm_file import load_described_dlrm

        config = load_described_dlrm(str(self.scenario.workload))
        if self.scenario.optimizer not in (None, "none"):
            config = replace(config, optimizer=str(self.scenario.optimizer))
        return config if self.scenario.embedding is None else replace(config, embedding=self.scenario.embedding)

    def of_transformer(self) -> Transformer:
        """The description of the Transformer, or why there is none."""
        if self.transformer is not None:
            return self.transformer
        if self.source != "transformer":
            raise TraincastError(
                f"{self.name} is {KINDS[self.source]}, not a description of a Transformer; name one such as llama3-8b "
                "or describe it in YAML"
            )
        from traincast.simulator.scenario.layouts import load_described_transformer

        return load_described_transformer(self.scenario.workload)

    def changed(self, **fields: Any) -> Resolved:
        """The step with other fields of its scenario; what hangs on them is loaded anew."""
        scenario = self.scenario.replace(**fields)
        check_used(scenario, replace(self, scenario=scenario).kind)
        loaded: dict[str, Any] = {}
        if {"on", "clock_mhz", "power_limit_w"} & set(fields):
            loaded["platform"] = _resolve_platform(scenario)
        if "host" in fields:
            loaded["host"] = _resolve_host(scenario, self.source)
        if "costs" in fields:
            loaded["costs"] = read_costs(scenario.costs)
        changed = replace(self, scenario=scenario, **loaded)
        return replace(changed, plan=_resolve_plan(changed)) if fields.get("plan") is not None else changed

    def with_platform(self, platform: Platform) -> Resolved:
        """The step elsewhere."""
        return replace(self, platform=platform)

    def with_device(self, **changes: Any) -> Resolved:
        """The step with other figures of its GPU."""
        return self.with_platform(replace(self.platform, device=replace(self.platform.device, **changes)))

    def with_topology(self, **changes: Any) -> Resolved:
        """The step with other figures of its links."""
        linked = add_default_links(self.platform)
        assert linked.topology is not None
        return self.with_platform(replace(linked, topology=replace(linked.topology, **changes)))

    def edited(self, name: str, function: Structural, *, across: bool = False, software: bool = False) -> Resolved:
        """The step with one more edit of its ops."""
        changed = replace(self, software=(*self.software, name)) if software else self
        entry = (name, function)
        if across:
            return replace(changed, across=(*self.across, entry))
        return replace(changed, structural=(*self.structural, entry))


def resolve(scenario: Scenario) -> Resolved:
    """A scenario with its names and files loaded, each once; a field that its kind of step does not use is an error."""
    source = scenario.workload
    if isinstance(source, Path):
        scenario = scenario.replace(workload=str(source))
    if isinstance(source, str) and not source:
        raise TraincastError("`workload` is missing: name a model, or give a file")
    if isinstance(scenario.on, str) and not scenario.on:
        raise TraincastError("`on` is missing: name the GPU or node to predict the step on")
    kind = find_source_kind(scenario.workload)
    check_used(scenario, choose_step_kind(kind, scenario))
    if scenario.dtype is None and kind != "tables":
        scenario = scenario.replace(dtype=get_default_dtype(kind))
    platform = _resolve_platform(scenario)
    content = compute_file_digest(scenario.workload) if isinstance(scenario.workload, str) else ""
    if kind == "workload" and isinstance(scenario.workload, str):
        from traincast.ir.file import load_workload

        scenario = scenario.replace(workload=load_workload(Path(scenario.workload)))
    resolved = Resolved(
        scenario=scenario, source=kind, platform=platform, host=_resolve_host(scenario, kind),
        costs=read_costs(scenario.costs), content=content,
    )  # fmt: skip
    return resolved if scenario.plan is None else replace(resolved, plan=_resolve_plan(resolved))


def _resolve_platform(scenario: Scenario) -> Platform:
    """The platform asked for, its power limited and its clock locked where they are given."""
    platform = load_platform(scenario.on) if isinstance(scenario.on, str) else scenario.on
    if scenario.power_limit_w is not None:
        platform = platform.with_power_limit(scenario.power_limit_w)
    return platform if scenario.clock_mhz is None else platform.with_clock(scenario.clock_mhz)


def _resolve_host(scenario: Scenario, kind: str) -> HostProfile | None:
    """The host asked for, or the one that a published program runs on; None is the platform's."""
    if isinstance(scenario.host, str):
        return load_host_profile(scenario.host)
    if scenario.host is not None or kind != "program":
        return scenario.host
    from traincast.models.catalog import find_published_program
    from traincast.simulator.scenario.workloads import find_published_host

    return find_published_host(find_published_program(str(scenario.workload)))


def _resolve_plan(resolved: Resolved) -> Plan:
    """The plan of tables that a scenario names, checked against its number of GPUs."""
    from traincast.simulator.scenario.tables import read_plan

    only = read_plan(str(resolved.scenario.plan))
    if resolved.gpus == 1 and resolved.source == "dlrm":
        raise TraincastError("on one GPU there is no `plan` to choose; give `gpus` of 2 or more")
    if only.world_size != resolved.gpus:
        raise TraincastError(
            f"the `plan` is for {only.world_size} ranks and the step on {resolved.gpus} GPUs; give its number"
        )
    return only


_LARGEST_FILE = 1 << 20  # bytes


def read_costs(costs: str | Path | Sequence[OpCost] | None) -> tuple[OpCost, ...]:
    """The costs of a `.toml` file (`["lib::op"]` with `seconds`, `flops`, `bytes`), or those given; None is none."""
    if costs is None:
        return ()
    if not isinstance(costs, str | Path):
        return tuple(costs)
    path = Path(costs)
    if not path.is_file():
        raise TraincastError(f'no file {path} with costs; write a .toml file with a table ["lib::op"] for each op')
    return read_op_costs(parse_toml(read_text(path, most=_LARGEST_FILE), str(path)), str(path))


_LAYOUT = ("tp", "pp", "vp", "cp", "ep", "etp", "global_batch", "micro_batch", "schedule", "checkpoint")
"""Fields of a layout that are shown even where they were not given."""


def list_settings(resolved: Resolved, result: Prediction) -> dict[str, Any]:
    """Every field by name with the value that was used; None where the kind of step does not use it, or where its
    default is nothing. Objects are shown by their names."""
    scenario, used = resolved.scenario, USED[resolved.kind]
    settings = list_settings_of_kind(scenario, resolved.kind, result)
    if result.parallel is not None:
        settings["batch_size"] = scenario.batch_size
        for name in _LAYOUT:
            settings[name] = getattr(result.parallel.layout, name)
    settings |= {name: value for name, value in _list_model_choices(resolved).items() if settings[name] is None}
    if "kernels" in used:
        settings["kernels"] = "compiled" if scenario.is_compiled else scenario.kernels or "eager"
    return settings


def list_settings_of_kind(scenario: Scenario, kind: str, result: Prediction) -> dict[str, Any]:
    """The settings of a step of a kind as far as the scenario and the prediction say them."""
    used = USED[kind]
    settings = {
        name: convert_to_plain(getattr(scenario, name)) if name in used else None for name in list_scenario_fields()
    }
    settings |= {"gpus": result.gpus, "host": result.host_profile, "mode": result.workload.mode}
    return settings | {"batch_size": result.workload.batch_size, "seq_len": result.workload.seq_len or None}


def _list_model_choices(resolved: Resolved) -> dict[str, Any]:
    """Optimizer, attention and embedding that a model has where none was asked for."""
    if resolved.kind == "transformer":
        return {"attention": "sdpa"}
    if resolved.kind == "parallel":
        return {"optimizer": "adam", "attention": "sdpa"}
    if resolved.source == "dlrm":
        config = resolved.of_dlrm()
        return {"optimizer": config.optimizer, "embedding": "fbgemm" if resolved.gpus > 1 else config.embedding}
    if resolved.source != "model":
        return {}
    from traincast.models.catalog import list_models

    info = next(info for info in list_models() if info.name == resolved.scenario.workload)
    own = {} if resolved.scenario.mode == "inference" else {"optimizer": info.optimizers[0]}
    return own | ({info.axis: info.choices[0]} if info.axis else {})


def format_settings(settings: dict[str, Any]) -> str:
    """One line with the settings that a step was predicted under: `dtype fp32, batch_size 8, kernels eager`."""
    shown = {name: value for name, value in settings.items() if value not in (None, False, "") and name != "workload"}
    if isinstance(shown.get("plan"), str) and len(shown["plan"]) > 60:
        shown["plan"] = "as given"
    return ", ".join(name if value is True else f"{name} {value}" for name, value in shown.items())


def convert_to_plain(value: Any) -> Any:
    """A value as JSON has it: objects by their key or name."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, list | tuple):
        return [convert_to_plain(one) for one in value]
    return str(getattr(value, "key", None) or getattr(value, "name", None) or value)


def format_predict_command(scenario: Scenario) -> str:
    """The command that predicts a scenario, with an option for every field that was given."""
    words = ["traincast", "predict", str(convert_to_plain(scenario.workload))]
    for name, value in scenario.given().items():
        if name == "workload":
            continue
        option = list_scenario_fields()[name].option
        words += [option] if value is True else [option, str(convert_to_plain(value))]
    return shlex.join(words)
