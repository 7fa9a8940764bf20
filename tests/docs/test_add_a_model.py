"""docs/extend/add-a-model.md, carried out."""

from __future__ import annotations

import json
import re

import pytest

from tests.docs.following import ROOT, follow, run_in

PAGE = "add-a-model.md"
BUILD = """
from pathlib import Path
from traincast.models import catalog
from traincast_evaluation.zoo.build import files
for module in (catalog, files):
    module.DATA, module.INDEX = Path("built"), Path("built/catalog.json")
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    follow(PAGE, folder)
    programs = folder / "traincast_evaluation/published/programs.toml"
    tables = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/extend" / PAGE).read_text(encoding="utf-8"), re.DOTALL)
    text = programs.read_text(encoding="utf-8")
    programs.unlink()  # a link to the package's own
    programs.write_text(text + "".join(f"\n{table}" for table in tables), encoding="utf-8")
    return folder


def test_the_page_touches_two_files_for_each_kind(tmp_path):
    assert follow(PAGE, tmp_path) == [
        "traincast_evaluation/published/catalog.py",
        "traincast_evaluation/published/one_mlp.py",
        "traincast_evaluation/zoo/build/recipes.py",
        "traincast_evaluation/zoo/define/alexnet.py",
    ]


def test_the_built_in_model_is_captured_listed_and_loaded(package):
    pytest.importorskip("torch")
    code = BUILD + (
        "built = [path.name for path, _ in files.build_model(files.RECIPES['alexnet'])]\n"
        "files.write_index()\n"
        "(info,) = catalog.list_models()\n"
        "step = catalog.load_model('alexnet', optimizer='adam').resized(batch_size=7)\n"
        "print(len(built), info.name, info.parameters, step.batch_size, step.mode)"
    )
    # three optimizers and inference, in fp32 and half precision; torchvision's AlexNet has 61,100,840 parameters
    assert run_in(package, code).split() == ["8", "alexnet", "61100840", "7", "training"]


def predicted(package, *arguments):
    code = f"from traincast.app.cli.main import main\nmain({['predict', *arguments, '--json']!r})"
    return json.loads(run_in(package, code))


def test_a_program_of_an_old_writer_is_predicted_by_name(package):
    result = predicted(package, "nvidia-dlrm-toy", "--on", "dgx-a100", "--gpus", "4", "--dtype", "fp16")

    assert (result["workload"], result["batch_size"]) == ("nvidia-dlrm-toy", 1024)


def test_a_program_of_a_new_writer_is_predicted_by_name(package):
    alone, many = (predicted(package, "one-mlp", "--on", "dgx-a100", "--gpus", gpus) for gpus in ("1", "8"))

    assert (alone["batch_size"], many["batch_size"]) == (8192, 1024)
    assert many["iteration_ms"] < alone["iteration_ms"]


def test_what_was_added_is_listed(package):
    code = (
        "from traincast_evaluation.published.catalog import published_programs\n"
        "program = published_programs()['one-mlp']\nprint(program.parameters, program.step(gpus=2).ranks)"
    )
    parameters = (1024 + 1) * 4096 + (4096 + 1) * 4096 + (4096 + 1) * 1024
    assert run_in(package, code) == f"{parameters} (0, 0)\n"
