"""The page of a prediction: the number and its evidence, why, the timeline, memory, money, kernels, provenance."""

from __future__ import annotations

from traincast.app.pages.charts import (
    RooflinePoint,
    find_roofline_points,
    make_memory_chart,
    make_roofline_chart,
    make_timeline_data,
)
from traincast.app.pages.page import (
    Html,
    Page,
    Section,
    fold_block,
    join_blocks,
    make_bar,
    make_chart,
    make_facts,
    make_heading,
    make_paragraph,
    make_table,
)
from traincast.app.pages.parts import (
    NO_PRICE,
    format_number,
    make_provenance_section,
    make_seconds_table,
    make_software_section,
    make_step_stack,
    make_step_tiles,
    make_verdict_html,
    make_warnings_html,
)
from traincast.app.report.chrome import make_chrome_trace
from traincast.app.report.prediction import format_peak_memory
from traincast.costs.kernels.families import list_measured_devices
from traincast.hardware.device import Device
from traincast.planner.what_if.money import Prices, compute_cost
from traincast.simulator.collective_calls import number_ranks
from traincast.simulator.prediction.rank_results import Note, RankResult
from traincast.simulator.prediction.result import Prediction, split_step, suggest_remedy
from traincast.utils.display.text import (
    format_count,
    format_dollars,
    format_duration,
    format_energy,
    format_milliseconds,
)

_MOST_RANKS = 64  # rows of a table of ranks
_MOST_KERNELS = 40
_MOST_POINTS = 300  # of a roofline
_LEAST_WORK = 0.01  # of what the device can do


def make_prediction_page(p: Prediction, price: float | None = None) -> Page:
    """The page of one predicted step; `price` is dollars of a GPU and hour."""
    title, subtitle, *_ = p.headline().split("\n")
    sections = [make_result_section(p), *make_detail_sections(p, price)]
    tiles = make_step_tiles(p, price)
    return Page(title=title, subtitle=subtitle.partition(":")[0], sections=sections, tiles=tiles)


def make_detail_sections(p: Prediction, price: float | None) -> list[Section]:
    """Everything below the result: why, timeline, memory, money, kernels, provenance."""
    sections = [make_why_section(p), make_timeline_section(p), make_kernels_section(p), make_memory_section(p)]
    sections += [make_ranks_section(p)] if len(p.ranks) > 1 else []
    sections.append(make_money_section(p, price))
    device = p.platform.device
    if device.is_cpu:  # neither a data sheet to draw a roofline from nor kernel models that were shipped
        return [*sections, make_software_section([("Device", f"{device.name}: {device.source}")])]
    return [*sections, *make_roofline_sections(p), make_provenance_section(p.by_family, p.platform, p.host_profile)]


def make_result_section(p: Prediction) -> Section:
    """What the number rests on, what else is known of the step, and warnings."""
    terms = ", ".join(f"{name.replace('_', ' ')} {sigma:.0%}" for name, sigma in p.interval_terms.items())
    known = [
        ("Throughput", f"{format_count(p.throughput.samples)} samples/s"),
        ("Tokens", f"{format_count(p.throughput.tokens)}/s" if p.throughput.tokens else ""),
        ("MFU", f"{p.throughput.mfu:.1%}{p.throughput.note}" if p.throughput.mfu else ""),
        ("Interval is made of", terms or "nothing"),
    ]
    if p.parallel is not None:
        known.append(("Layout", p.parallel.layout.described()))
    remedy = suggest_remedy(p)
    blocks = [
        make_verdict_html(p.trust),
        make_warnings_html([Note(f"Worth trying: {remedy}.")] if remedy else []),
        make_facts(pair for pair in known if pair[1]),
        make_warnings_html(p.warnings),
        _describe_neighbours(p),
    ]
    if p.out_of_domain_ops or p.estimated_ops:
        named = [(item.op, f"outside of what was fitted: {item.why}") for item in p.outside]
        named += [(name, "no kernel model: from its bytes") for name in p.estimated_ops]
        blocks.append(fold_block(f"Ops that are extrapolated ({len(named)})",
                             make_table(("op", "why"), named, caption="Ops outside of measurements")))  # fmt: skip
    return Section(key="answer", title="How sure it is", html=join_blocks(blocks))


def _describe_neighbours(p: Prediction) -> Html:
    """For every kernel family of the step, whether this very device was measured for it."""
    key, whole = p.platform.device.key, sum(p.by_family.values()) or 1.0
    rows = []
    for family, seconds in p.by_family.items():
        devices = list_measured_devices(family)
        measured = p.platform.device.is_cpu or key in devices
        kinds = f" ({', '.join(devices[key])})" if devices.get(key) else ""
        others = f"{len(devices)} other devices" if devices else "nodes" if family == "collective" else "none"
        near = f"this device{kinds}" if measured else others
        rows.append((family, f"{seconds / whole:.1%}", near))
    return make_table(
        ("kernels", "of kernel time", "measured on"), rows, right=(1,), caption="Where kernels were measured"
    )


def list_step_parts(p: Prediction) -> list[tuple[str, float]]:
    """What the seconds of a step are spent on; they add up to it."""
    if p.parallel is not None:
        return split_step(p)
    compute = p.device_active - p.exposed_comm
    return [("computing", compute), ("exposed communication", p.exposed_comm), ("device idle", p.device_idle)]


def make_why_section(p: Prediction) -> Section:
    """The step by what it is spent on, and what holds it up."""
    on_path = [(f"{op} (rank {rank})" if p.gpus > 1 else op, s) for (rank, op), s in p.path_by_place.items()]
    blocks = [
        make_step_stack(list_step_parts(p), p.iteration, "One step"),
        make_paragraph(
            f"The host is busy for {format_milliseconds(p.host)} ms of the step, alongside the device.", "note"
        ),
        make_heading("What holds the step up"),
        make_seconds_table("on the critical path", p.path_by_activity, "The critical path by what it is spent on"),
        fold_block("by op", make_seconds_table("op", dict(on_path), "The critical path by op")),
    ]
    return Section(key="why", title="Why", html=join_blocks(blocks))


def make_kernels_section(p: Prediction) -> Section:
    """Kernel time by family, phase, module, layer, op, and by where durations come from."""
    blocks = [
        make_seconds_table("family", p.by_family, "Kernel time by family"),
        fold_block("by phase", make_seconds_table("phase", p.by_phase, "Kernel time by phase")),
        fold_block("by module", make_seconds_table("module", p.by_module, "Kernel time by module")),
        fold_block("by layer", make_seconds_table("layer", p.by_layer, "Kernel time by layer")),
        fold_block("by op", make_seconds_table("op", p.by_op, "Kernel time by op")),
        fold_block("by where durations come from", make_seconds_table("source", p.by_source, "Kernel time by source")),
    ]
    return Section(key="kernels", title="Kernels", html=join_blocks(blocks))


def make_timeline_section(p: Prediction) -> Section:
    """The timeline of the ranks that differ, with the critical path over it."""
    data = make_timeline_data(make_chrome_trace(p), period=p.simulation.seconds)
    ranks = " Ranks that do the same are shown once." if p.gpus > 1 else ""
    figures = p.parallel
    if figures is not None and figures.simulated < figures.layout.accumulation:
        ranks += (
            f" {figures.simulated} of {figures.layout.accumulation} micro-batches are shown; the others repeat them."
        )
    html = make_chart(
        "timeline",
        "Timeline of the predicted step, per rank, host thread and stream; the critical path is the thick line",
        f"One step of many, {format_duration(p.simulation.seconds)} from left to right: where the host runs ahead it "
        f"works on the next step while the device is on this one.{ranks}",
    )
    return Section(key="timeline", title="Timeline", html=html, charts={"timeline": data}, wide=True)


def make_memory_section(p: Prediction) -> Section:
    """Peak memory of the fullest rank by kind, and its live memory over the step."""
    kinds = {kind: size / 1e9 for kind, size in p.memory.by_kind.items()}
    largest = max(kinds.values(), default=0.0) or 1.0
    by_kind = sorted(kinds.items(), key=lambda item: -item[1])
    of_rank = " of the fullest rank" if p.gpus > 1 else ""
    blocks = [
        make_paragraph(f"Allocated at the peak{of_rank}: {format_peak_memory(p)}."),
        make_table(
            ("kind", "GB", ""),
            [(k.replace("_", " "), format_number(gb), make_bar(gb / largest)) for k, gb in by_kind if gb],
            right=(1,),
            caption="What is alive at the peak",
        ),
        make_chart(
            "memory",
            "Allocated device memory over the step",
            "In the order in which the host allocates and frees; categories add up.",
        ),
    ]
    return Section(
        key="memory",
        title="Memory",
        html=join_blocks(blocks),
        charts={"memory": make_memory_chart(p.memory)},
    )


def make_ranks_section(p: Prediction) -> Section:
    """What every rank spends its step on, and what it holds. Under a layout messages wait on streams of their own, so
    that waiting adds up to more than the step and is left out."""
    capacity, layout = p.platform.device.memory_bytes, p.parallel is not None

    def row(result: RankResult) -> tuple[str, ...]:
        waiting = "" if layout else format_milliseconds(result.waiting)
        held = result.memory.peak_bytes
        return (
            number_ranks(result.ranks),
            format_milliseconds(result.compute),
            format_milliseconds(result.exposed_comm),
            waiting,
            format_milliseconds(result.device_idle),
            f"{held / 1e9:.2f}",
            make_bar(held / capacity),
        )

    header = ("ranks", "computing", "exposed", "waiting", "idle", "GB", "of the device")
    rows = [row(result) for result in p.ranks[:_MOST_RANKS]]
    more = f" (the first {_MOST_RANKS} of {len(p.ranks)} that differ)" if len(p.ranks) > _MOST_RANKS else ""
    table = make_table(header, rows, right=range(1, 6), caption=f"Milliseconds of the step, and memory{more}")
    return Section(key="ranks", title="Ranks", html=table)


def make_money_section(p: Prediction, price: float | None) -> Section:
    """What steps cost, where a price is known."""
    cost = compute_cost(p, Prices(per_gpu_hour=price))
    known = [
        ("Samples a step", f"{cost.samples:,}"),
        ("GPU hours for a million steps", f"{p.gpus * p.iteration / 3.6e-3:,.0f}"),
    ]
    if cost.joules_per_step is not None:
        energy = format_energy(cost.joules_per_step / 3.6e6)
        known.append(("Energy of a step, at most", f"{energy} (all GPUs at their power limit)"))
    if price is None:
        return Section(key="money", title="What it costs", html=join_blocks([
            make_facts(known), make_paragraph(NO_PRICE, "note")]))  # fmt: skip
    per_step = cost.dollars_per_step
    assert per_step is not None
    known += [
        ("Price", f"${price:g} a GPU and hour"),
        ("A million samples", format_dollars(1e6 * per_step / cost.samples)),
        ("A million steps", format_dollars(1e6 * per_step)),
    ]
    return Section(key="money", title="What it costs", html=make_facts(known))


def _select_shown(points: list[RooflinePoint], device: Device) -> list[RooflinePoint]:
    """The longest kernels, without those whose time is that of their launch."""

    def is_work(point: RooflinePoint) -> bool:
        ceiling = min(device.get_peak_flops(point.compute), device.dram_bandwidth * point.intensity)
        return point.flops / point.seconds > _LEAST_WORK * ceiling

    return [point for point in points if is_work(point)][:_MOST_POINTS] or points[:1]


def make_roofline_sections(p: Prediction) -> list[Section]:
    """Kernels below the device's ceilings, where there are any with arithmetic."""
    points = find_roofline_points(p.timeline)
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
        make_chart("roofline", "Roofline: operations per second of every distinct kernel over its operations per byte",
              "Sustained: at the clock a long load holds and 88 % of the DRAM rate, what good kernels reach. Streaming "
              "kernels count one operation an element. Points above a memory slope read from the L2. Kernels "
              "below a hundredth of their ceiling, whose time is that of a launch, are in the table only."),
        fold_block(f"kernels ({len(points)})",
               make_table(header, rows, right=range(3, 8), caption="Kernels with most device time first")),
    ]  # fmt: skip
    return [Section(key="roofline", title="Roofline", html=join_blocks(blocks),
                    charts={"roofline": make_roofline_chart(_select_shown(points, device), device)})]  # fmt: skip
