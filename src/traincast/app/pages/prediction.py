"""The page of a prediction: the number and its evidence, why, the timeline, memory, money, kernels, provenance."""

from __future__ import annotations

from traincast.app.pages.charts import memory_chart, roofline_chart, roofline_points
from traincast.app.pages.elements import Html, bar, chart, facts, folded, heading, joined, paragraph, table
from traincast.app.pages.page import Page, Section
from traincast.app.pages.parts import NO_PRICE, number_html, seconds_table, step_stack, verdict_html, warnings_html
from traincast.app.pages.provenance import measured_devices, provenance_section, software_section
from traincast.app.pages.timelines import timeline_data
from traincast.app.report.chrome import chrome_trace
from traincast.app.report.prediction import peak_memory_text
from traincast.planner.what_if.money import Prices, cost_of
from traincast.simulator.matched_calls import rank_list
from traincast.simulator.parallelism.figures import split_step
from traincast.simulator.prediction.rank_results import RankResult
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.prediction.step_path import seconds_by_place, seconds_by_what
from traincast.utils.display.text import format_milliseconds

_MOST_RANKS = 64  # rows of a table of ranks
_MOST_KERNELS = 40


def prediction_page(p: Prediction, price: float | None = None) -> Page:
    """The page of one predicted step; `price` is dollars of a GPU and hour."""
    title, subtitle, *_ = p.headline().split("\n")
    sections = [make_result_section(p), *detail_sections(p, price)]
    return Page(title=title, subtitle=subtitle.partition(":")[0], sections=sections)


def detail_sections(p: Prediction, price: float | None) -> list[Section]:
    """Everything below the result: why, timeline, memory, money, kernels, provenance."""
    sections = [why_section(p), timeline_section(p), memory_section(p), money_section(p, price)]
    device = p.platform.device
    if device.is_cpu:  # neither a data sheet to draw a roofline from nor kernel models that were shipped
        return [*sections, software_section([("Device", f"{device.name}: {device.source}")])]
    return [*sections, *roofline_sections(p), provenance_section(p.by_family, p.platform, p.host_profile)]


def verdict_of(p: Prediction) -> Html:
    """What the number rests on."""
    kernels = sum(p.by_family.values()) or 1.0
    return verdict_html(p.out_of_domain_seconds / kernels, p.estimated_seconds / kernels)


def make_result_section(p: Prediction) -> Section:
    """The number, its interval, what it rests on, and warnings."""
    terms = ", ".join(f"{name.replace('_', ' ')} {sigma:.0%}" for name, sigma in p.interval_terms.items())
    known = [
        ("Throughput", p.throughput.text(p.platform.device.name, p.gpus)),
        ("Device active", f"{p.device_active / (p.iteration or 1.0):.0%}"),
        ("Peak memory", peak_memory_text(p)),
        ("Interval is made of", terms or "nothing"),
    ]
    if p.parallel is not None:
        known.append(("Layout", p.parallel.layout.described()))
    refused = [] if p.fits else [paragraph("Rejected: it does not fit in memory", "verdict")]
    blocks = [
        number_html(p.iteration, p.interval), *refused,
        verdict_of(p), facts(known), warnings_html(p.warnings), heading("Measured neighbours"), _neighbours(p),
    ]  # fmt: skip
    if p.out_of_domain_ops or p.estimated_ops:
        named = [(item.op, f"outside of what was fitted: {item.why}") for item in p.outside]
        named += [(name, "no kernel model: from its bytes") for name in p.estimated_ops]
        blocks.append(folded(f"Ops that are extrapolated ({len(named)})",
                             table(("op", "why"), named, caption="Ops outside of measurements")))  # fmt: skip
    return Section(key="answer", title="How long", html=joined(blocks))


def _neighbours(p: Prediction) -> Html:
    """For every kernel family of the step, whether this very device was measured for it."""
    key, whole = p.platform.device.key, sum(p.by_family.values()) or 1.0
    rows = []
    for family, seconds in p.by_family.items():
        devices = measured_devices(family)
        measured = p.platform.device.is_cpu or key in devices
        near = "this device" if measured else f"{len(devices)} other devices" if devices else "no kernel of it"
        rows.append((family, f"{seconds / whole:.1%}", near))
    return table(("kernels", "of kernel time", "measured on"), rows, right=(1,), caption="What was measured")


def step_parts(p: Prediction) -> list[tuple[str, float]]:
    """What the seconds of a step are spent on; they add up to it."""
    if p.parallel is not None:
        return split_step(p)
    compute = p.device_active - p.exposed_comm
    return [("computing", compute), ("exposed communication", p.exposed_comm), ("device idle", p.device_idle)]


def why_section(p: Prediction) -> Section:
    """The step by what it is spent on, then kernels by family, phase and module."""
    path = p.path
    on_path = [(f"{op} (rank {rank})" if p.gpus > 1 else op, s) for (rank, op), s in seconds_by_place(path).items()]
    blocks = [
        step_stack(step_parts(p), p.iteration, "One step"),
        paragraph(f"The host is busy for {format_milliseconds(p.host)} ms of the step, alongside the device.", "note"),
        heading("What holds the step up"),
        seconds_table("on the critical path", seconds_by_what(path), "The critical path by what it is spent on"),
        folded("by op", seconds_table("op", dict(on_path), "The critical path by op")),
        heading("Kernels"),
        seconds_table("family", p.by_family, "Kernel time by family"),
        folded("by phase", seconds_table("phase", p.by_phase, "Kernel time by phase")),
        folded("by module", seconds_table("module", p.by_module, "Kernel time by module")),
        folded("by layer", seconds_table("layer", p.by_layer, "Kernel time by layer")),
        folded("by op", seconds_table("op", p.by_op, "Kernel time by op")),
        folded("by where durations come from", seconds_table("source", p.by_source, "Kernel time by source")),
    ]
    return Section(key="why", title="Why", html=joined(blocks))


def timeline_section(p: Prediction) -> Section:
    """The timeline of the ranks that differ, with the critical path over it."""
    data = timeline_data(chrome_trace(p))
    html = chart("timeline", "Timeline of the predicted step, per rank, host thread and stream; the critical path is "
                 "the thick line", "Ranks that do the same are shown once.")  # fmt: skip
    return Section(key="timeline", title="Timeline", html=html, charts={"timeline": data})


def memory_section(p: Prediction) -> Section:
    """Peak memory by kind and rank, and live memory over the step of the rank that the others wait for."""
    capacity = p.platform.device.memory_bytes
    kinds = {kind: size / 1e9 for kind, size in p.memory.by_kind.items()}
    largest = max(kinds.values(), default=0.0) or 1.0
    by_kind = sorted(kinds.items(), key=lambda item: -item[1])
    blocks = [
        paragraph(f"Peak of the fullest rank: {peak_memory_text(p)}."),
        table(("kind", "GB", ""), [(k.replace("_", " "), f"{gb:.3f}", bar(gb / largest)) for k, gb in by_kind],
              right=(1,), caption="What is alive at the peak"),
        chart("memory", "Live device memory over the step", "Of the rank that the others wait for, as the host issues "
              "ops; parameters and tables are there all the time."),
    ]  # fmt: skip
    if p.gpus > 1:
        blocks.append(_ranks_table(p, capacity))
    return Section(
        key="memory", title="Memory", html=joined(blocks), charts={"memory": memory_chart(p.timeline, capacity)}
    )


def _ranks_table(p: Prediction, capacity: float) -> Html:
    def row(result: RankResult) -> tuple[str, ...]:
        times = (result.compute, result.exposed_comm, result.waiting, result.device_idle)
        held = result.memory.peak_bytes
        return (
            rank_list(result.ranks), *(format_milliseconds(s) for s in times), f"{held / 1e9:.2f}", bar(held / capacity)
        )  # fmt: skip

    header = ("ranks", "computing, ms", "exposed, ms", "waiting, ms", "idle, ms", "GB", "of the device")
    rows = [row(result) for result in p.ranks[:_MOST_RANKS]]
    more = f" (the first {_MOST_RANKS} of {len(p.ranks)} that differ)" if len(p.ranks) > _MOST_RANKS else ""
    return table(header, rows, right=range(1, 6), caption=f"Ranks: time and memory{more}")


def money_section(p: Prediction, price: float | None) -> Section:
    """What steps cost, where a price is known."""
    cost = cost_of(p, Prices(per_gpu_hour=price))
    known = [
        ("Samples a step", f"{cost.samples:,}"),
        ("GPU hours for a million steps", f"{p.gpus * p.iteration / 3.6e-3:,.0f}"),
    ]
    if cost.joules_per_step is not None:
        known.append(("Energy of a step, at most", f"{cost.joules_per_step:,.4g} J (all GPUs at their power limit)"))
    if price is None:
        return Section(key="money", title="What it costs", html=joined([
            facts(known), paragraph(NO_PRICE, "note")]))  # fmt: skip
    per_step = cost.dollars_per_step
    assert per_step is not None
    known += [
        ("Price", f"${price:g} a GPU and hour"),
        ("A million samples", f"${1e6 * per_step / cost.samples:,.4g}"),
        ("A million steps", f"${1e6 * per_step:,.4g}"),
    ]
    return Section(key="money", title="What it costs", html=facts(known))


def roofline_sections(p: Prediction) -> list[Section]:
    """Kernels below the device's ceilings, where there are any with arithmetic."""
    points = roofline_points(p.timeline)
    if not points:
        return []
    device = p.platform.device
    rows = [
        (point.family, point.kind, point.compute, str(point.count), f"{1e6 * point.seconds:,.1f}",
         f"{point.flops / point.seconds / 1e12:,.3g}", f"{point.nbytes / point.seconds / 1e9:,.0f}",
         f"{point.intensity:,.2f}")
        for point in points[:_MOST_KERNELS]
    ]  # fmt: skip
    header = ("family", "kind", "type", "launches", "us each", "Tflop/s", "GB/s", "flop per byte")
    blocks = [
        chart("roofline", "Roofline: operations per second of every distinct kernel over its operations per byte",
              "Sustained: at the clock a long load holds and 88 % of the DRAM rate, what good kernels reach. Streaming "
              "kernels count one operation an element. Points above a memory slope read from the L2."),
        folded(f"kernels ({len(points)})",
               table(header, rows, right=range(3, 8), caption="Kernels with most device time first")),
    ]  # fmt: skip
    return [Section(key="roofline", title="Kernels and what the device can do", html=joined(blocks),
                    charts={"roofline": roofline_chart(points[:300], device)})]  # fmt: skip
