"""docs/extend/add-a-gpu.md, carried out: a GPU of an architecture that no file of the source names."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from tests.docs.pages import DOCS, blocks_of, commands_of
from traincast.app.cli.main import main
from traincast.hardware import load_platform

BLOCKS = blocks_of((DOCS / "extend" / "add-a-gpu.md").read_text(encoding="utf-8"))


@pytest.fixture
def written(tmp_path, monkeypatch):
    """The folder that a reader of the page has, as the current one."""
    for block in BLOCKS:
        if block.title:
            (tmp_path / block.title).write_text(block.body, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def results(capsys):
    for command in [command for block in BLOCKS if block.language == "console" for command in commands_of(block.body)]:
        assert main([*shlex.split(command.line)[1:], "--json"]) == 0
        yield json.loads(capsys.readouterr().out)


def test_the_page_predicts_on_one_gpu_and_on_two_nodes(written, capsys):
    alone, many = results(capsys)

    assert (alone["platform"], many["platform"]) == ("rubin", "rubin-node")
    assert alone["iteration_ms"] > 0
    assert many["iteration_ms"] > alone["iteration_ms"], "gradients are reduced"


def test_a_chip_nobody_measured_is_less_certain_than_a_measured_one(written, capsys):
    def width(on):
        assert main(["predict", "resnet50", "--on", on, "--json"]) == 0
        low, high = json.loads(capsys.readouterr().out)["interval_ms"]
        return high / low

    assert width("rubin.toml") > width("a100-80gb")


def test_the_node_holds_eight_of_the_sheet_beside_it(written):
    platform = load_platform("rubin-node.toml")

    assert (platform.device.key, platform.device.arch, platform.device.vendor) == ("rubin", "rubin", "nvidia")
    assert platform.gpus_per_node == 8
    assert platform.topology.host_bandwidth == 128e9, "PCIe 6 of the sheet"


def test_no_file_of_the_source_names_an_architecture_but_the_one_with_the_table():
    from tests.imports import PACKAGE
    from traincast.hardware.sheet import ARCHITECTURES

    quoted = re.compile("|".join(f'"{arch}"' for arch in ARCHITECTURES))
    naming = {path.name for path in PACKAGE.rglob("*.py") if quoted.search(path.read_text(encoding="utf-8"))}

    assert naming <= {"sheet.py", "embedding_data.py"}, "embedding_data names measurements after the GPU they are of"
