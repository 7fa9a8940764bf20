"""torchvision's classifiers: their sizes, and rows that are predicted or left out by name."""

from __future__ import annotations

import pytest

from traincast_evaluation.suites.registry import evaluate

torch = pytest.importorskip("torch")
_HEADER = "device,model,mode,precision,batch,img_size,iteration_ms"


@pytest.mark.parametrize(
    ("net", "millions"),
    [
        ("resnet18", 11.69), ("resnext50_32x4d", 25.03), ("wide_resnet50_2", 68.88), ("densenet121", 7.98),
        ("mobilenet_v2", 3.50), ("mnasnet0_5", 2.22), ("shufflenet_v2_x1_0", 2.28), ("squeezenet1_1", 1.24),
        ("vgg11", 132.86), ("vgg16_bn", 138.37),
    ],
)  # fmt: skip
def test_nets_have_as_many_parameters_as_torchvisions(net, millions):
    from traincast_evaluation.zoo.build.torchvision_steps import list_torchvision_nets

    with torch.device("meta"):
        model = list_torchvision_nets()[net]()
        scores = model(torch.empty(2, 3, 224, 224))
    assert scores.shape == (2, 1000)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 2) == millions


def test_a_row_is_predicted_and_an_unknown_net_or_mode_is_left_out_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINCAST_HOME", str(tmp_path / "home"))
    (tmp_path / "iterations").mkdir()
    row = "NVIDIA TITAN V,squeezenet1_1,{},fp16 (model.half),12,224,5.0"
    rows = [row.format("train (forward+loss+backward)"), row.format("asleep"), row.format("x").replace("1_1", "9_9")]
    (tmp_path / "iterations" / "torchvision_batch12.csv").write_text("\n".join([_HEADER, *rows]) + "\n")

    result = evaluate("torchvision", tmp_path)

    (outcome,) = result.outcomes
    assert 1.0 < outcome.predicted_ms < 50.0
    asleep, unknown = (left.reason for left in result.left_out)
    assert "'asleep' is neither train nor inference" in asleep
    assert "squeezenet9_9" in unknown
