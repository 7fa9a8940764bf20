"""Bad input is one clear line on stderr and exit code 2, never a traceback."""

from __future__ import annotations

import zipfile

import pytest

from traincast.app.cli.main import main
from traincast.ir.file import save_workload
from traincast.models.catalog import load_model


def refusal(capsys, *arguments):
    code = main([str(a) for a in arguments])
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    return captured.err


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "step.tc"
    save_workload(load_model("dlrm-default"), path)
    return path


def test_unknown_model_names_the_nearest(capsys):
    assert "dlrm-default" in refusal(capsys, "predict", "dlrm-defualt", "--on", "v100")


def test_unknown_platform_names_the_nearest(capsys):
    assert "v100" in refusal(capsys, "predict", "dlrm-default", "--on", "v1oo")


def test_this_machine_is_refused_until_it_is_measured(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINCAST_HOME", str(tmp_path))
    assert "measure this machine with 'traincast bench'" in refusal(capsys, "predict", "dlrm-default", "--on", "here")


def test_missing_workload_file(capsys, tmp_path):
    assert "nowhere.tc" in refusal(capsys, "predict", tmp_path / "nowhere.tc", "--on", "v100")


def test_missing_yaml(capsys, tmp_path):
    assert "nowhere.yaml" in refusal(capsys, "predict", tmp_path / "nowhere.yaml", "--on", "v100")


@pytest.mark.parametrize("batch", [0, -1, 10**12, 10**30])
def test_batch_size_out_of_range(capsys, batch):
    assert str(batch) in refusal(capsys, "predict", "dlrm-default", "--on", "v100", "--batch-size", batch)


def test_sequence_length_of_a_model_without_sequences(capsys):
    assert "--seq-len is not used" in refusal(capsys, "predict", "dlrm-default", "--on", "v100", "--seq-len", 128)


@pytest.mark.parametrize("clock", [0, -5, 1e9, "nan"])
def test_clock_out_of_range(capsys, clock):
    assert "MHz" in refusal(capsys, "predict", "dlrm-default", "--on", "v100", "--clock-mhz", clock)


def test_truncated_workload(capsys, saved):
    saved.write_bytes(saved.read_bytes()[:500])
    assert "step.tc" in refusal(capsys, "predict", saved, "--on", "v100")


def test_workload_of_a_newer_version(capsys, saved, tmp_path):
    newer = tmp_path / "newer.tc"
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(newer, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name == "workload.json":
                data = data.replace(b'"version":1', b'"version":99').replace(b'"version": 1', b'"version": 99')
            new.writestr(name, data)
    message = refusal(capsys, "predict", newer, "--on", "v100")
    assert "99" in message
    assert "newer" in message


def test_optimizer_of_a_saved_workload_cannot_change(capsys, saved):
    assert "optimizer" in refusal(capsys, "predict", saved, "--on", "v100", "--optimizer", "adam")


def test_trace_into_a_missing_folder(capsys, tmp_path):
    target = tmp_path / "no" / "trace.json"
    assert "cannot write" in refusal(capsys, "predict", "dlrm-default", "--on", "v100", "--trace-out", target)


def test_malformed_platform_file(capsys, tmp_path):
    path = tmp_path / "gpu.toml"
    path.write_text("memory_gb = 'lots'\n[peak_tflops]\nfp32 = 1\n")
    assert "boost_clock_mhz" in refusal(capsys, "predict", "dlrm-default", "--on", path)


def test_evaluate_without_data(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("TRAINCAST_DATA", raising=False)
    assert "--data" in refusal(capsys, "evaluate", "dlrm")
    assert "--data" in refusal(capsys, "evaluate", "dlrm", "--data", tmp_path / "none")


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["predict"], ["predict", "dlrm-default", "--on", "v100", "--dtype", "int3"]],
)
def test_argument_errors_are_one_line_that_names_the_help(capsys, arguments):
    assert "--help" in refusal(capsys, *arguments)


@pytest.mark.parametrize(("module", "extra"), [("polars", "data"), ("torch", "capture")])
def test_a_missing_extra_is_named(capsys, monkeypatch, module, extra, tmp_path):
    def missing(*_):
        raise ModuleNotFoundError(f"No module named '{module}'", name=module)

    monkeypatch.setattr("traincast_evaluation.fitting.shipped.fit_profiles", missing)
    assert f"traincast[{extra}]" in refusal(capsys, "fit", "host", "--data", tmp_path)


@pytest.mark.parametrize(
    "arguments",
    [
        ("export", "dlrm-default", "-o"),
        ("export", "dlrm-default", "--to", "chakra", "-o"),
        ("fit", "host", "--out"),
        ("capture", "step.py:make_step", "-o"),
    ],
)
def test_output_that_cannot_be_written(capsys, tmp_path, monkeypatch, shared_data, arguments):
    (tmp_path / "file").write_text("")
    (tmp_path / "step.py").write_text(
        "import torch\ndef make_step(b):\n    return lambda: torch.ones(b, device='cuda') + 1\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINCAST_DATA", str(shared_data))
    assert "file" in refusal(capsys, *arguments, tmp_path / "file" / "out")


def test_a_step_larger_than_the_device_is_a_warning_in_the_answer(capsys):
    assert main(["predict", "gpt3-2.7b", "--on", "p4", "--json"]) == 0
    captured = capsys.readouterr()
    assert "GB too much" in captured.out


@pytest.mark.parametrize("option", [("--jitter", "-0.1"), ("--skew-ms", "nan"), ("--jitter", "1", "--seed", "-1")])
def test_unevenness_out_of_range(capsys, option):
    assert "give" in refusal(capsys, "predict", "dlrm-default", "--on", "dgx-a100", "--gpus", 2, *option)


def test_unevenness_of_a_scaling_curve(capsys):
    assert "one number" in refusal(
        capsys, "predict", "resnet50", "--on", "dgx-a100", "--gpus", "2,4", "--jitter", "0.1"
    )


def test_a_piece_named_twice_is_fitted_once(capsys, monkeypatch, tmp_path):
    asked = []
    fit_pieces = "traincast_evaluation.fitting.shipped.fit_profiles"
    monkeypatch.setattr(fit_pieces, lambda pieces, *_: asked.append(pieces) or {})
    assert main(["fit", "host", "norm", "host", "--data", str(tmp_path)]) == 0
    assert asked == [["host", "norm"]]
