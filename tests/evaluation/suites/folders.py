"""Small made-up folders of measurements, in the form of the published ones."""

from __future__ import annotations

from pathlib import Path

V100 = "Tesla V100-SXM2-16GB"
A100 = "NVIDIA A100-SXM4-40GB"

DLRM = {
    "device": V100, "model": "DLRM_default", "batch": "512", "iteration_ms": "5.0", "gpu_active_ms_implied": "2.5",
    "ref_err_e2e_pct": "-6.9", "ref_err_kernel_only_pct": "-53.7",
}  # fmt: skip
CNN = {
    "device": V100, "model": "ResNet50", "batch": "16", "iteration_ms": "66.5", "ref_abs_err_pct": "5.0",
    "habitat_abs_err_pct": "8.0",
}  # fmt: skip
TRANSFORMER = {
    "device": "NVIDIA A100-PCIE-40GB", "model": "bert_large", "mode": "train", "seq_len": "512", "batch": "2",
    "compiled": "false", "e2e_ms": "200.0", "neusight_pred_e2e_ms": "220.0", "roofline_pred_e2e_ms": "",
}  # fmt: skip
FOUR_GPUS = {
    "device": A100, "num_gpus": "4", "model": "gpt2_large", "seq_len": "1024", "global_batch": "4", "strategy": "dp",
    "iteration_ms": "450.0", "neusight_pred_iteration_ms": "495.0",
}  # fmt: skip
DLE = {
    "framework": "pytorch", "readme_date": "2021-03-24", "system": "DGX A100", "device": A100, "num_gpus": "8",
    "model_size": "small", "precision": "amp_fp16", "global_batch": "65536", "iteration_ms": "4.0",
}  # fmt: skip
MLPERF = {
    "mlperf_round": "v0.7", "submitter": "Somebody", "system": "box", "benchmark": "dlrm", "accelerator": "NVIDIA A100",
    "gpus_per_node": "8", "num_nodes": "1", "num_gpus": "8", "framework": "PyTorch 1.6.0", "global_batch": "55296",
    "iteration_ms": "3.2",
}  # fmt: skip
EMBEDDINGS = {
    "device": "NVIDIA A100-SXM4 (DGX A100)", "model": "tiny", "num_gpus": "1", "global_batch": "1024",
    "iteration_ms": "20.0",
}  # fmt: skip


def write_rows(folder: Path, name: str, *rows: dict[str, str]) -> Path:
    """A folder of measurements whose table `iterations/NAME.csv` has these rows."""
    path = folder / "iterations" / f"{name}.csv"
    path.parent.mkdir(exist_ok=True)
    lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
