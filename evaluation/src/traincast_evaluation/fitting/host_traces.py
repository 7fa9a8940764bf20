"""Host profiles from public traces: one per host, named after the GPU it drove."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from traincast.traces.kineto import read_kineto
from traincast.traces.link import link_trace
from traincast.traces.overheads.extraction import Overheads, estimate_profiler_cost, measure_overheads
from traincast_evaluation.fitting.host import build_study_profile
from traincast_evaluation.fitting.host_profile import build_host_profile, fill_host_profile

# profile -> (trace files, where they come from, what ran)
PROFILES: dict[str, tuple[tuple[str, ...], str, str]] = {
    "v100-resnet50-2021": (
        ("kineto_resnet50_v100/num_workers_0.json.gz", "kineto_resnet50_v100/num_workers_4.json.gz"),
        "pytorch/kineto, tb_plugin/samples, blobs 769c3eb7 and 234cf25d (BSD-3-Clause)",
        "ResNet-50, batch 32, DGX Station V100, PyTorch 1.8/1.9; stack recording was on, which slows the host",
    ),
    "a100-recsys-2022": (
        ("hta_recsys_a100_rank3of8/kineto_rank3.json.gz",),
        "facebookresearch/HolisticTraceAnalysis @ f4d0062c (MIT)",
        "recommender, rank 3 of 8, A100 40 GB",
    ),
    "v100-dlrm-2022": (
        tuple(f"param_dlrm_8xv100/kineto_rank{rank}.json.gz" for rank in range(8)),
        "facebookresearch/param @ 1e115ffc (MIT)",
        "DLRM, 8 ranks, V100-SXM2-32GB",
    ),
    "h100-vgg13-2025": (
        ("triosim_vgg13_h100/kineto_iter41.json.gz",),
        "sarchlab/triosim @ 3fb3c060 (MIT)",
        "VGG-13, batch 512, H100; stack and memory recording was on, which slows the host",
    ),
}


# current servers: the host of a trace, and for ops that it did not run the study's, scaled to it
SERVERS = {"server-2022": "a100-recsys-2022", "server-dlrm-2022": "v100-dlrm-2022"}


def fit_host_from_traces(data: Path, out: Path, progress: Callable[[str, float], None]) -> dict[str, dict[str, Any]]:
    """Writes one host profile per entry of `PROFILES` and of `SERVERS` into `out` and returns them."""
    profiles = {}
    progress("host overheads from traces", 0.0)
    for name, (files, source, what) in PROFILES.items():
        overheads: list[Overheads] = []
        costs = []
        for file in files:
            linked = link_trace(read_kineto(data / "traces" / file))
            cost = estimate_profiler_cost(linked)
            costs.append({"file": file, "op_us": cost.op / 1e3, "call_us": cost.call / 1e3, "steps": len(linked.steps)})
            overheads.append(measure_overheads(linked, cost))
        provenance = {"sources": [source], "host": what, "profiler_cost_removed": costs}
        profiles[name] = build_host_profile(overheads, provenance)
    study = build_study_profile(data)
    for name, traced in SERVERS.items():
        profiles[name] = fill_host_profile(profiles[traced], study)
    for name, profile in profiles.items():
        text = json.dumps(profile, indent=1, sort_keys=True)
        (out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    return profiles
