"""From recipes to the data files of the package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from traincast.capturing import capture_step
from traincast.ir.file import load_workload, save_workload
from traincast.ir.workload import STUDY_FRAMEWORK, Workload
from traincast.models.catalog import DATA, INDEX, ModelInfo, file_name
from traincast.utils.errors import TraincastError
from traincast_evaluation.zoo.build.legacy import split_engine_ops
from traincast_evaluation.zoo.build.recipes import RECIPES, Recipe
from traincast_evaluation.zoo.build.steps import Setting


def capture_variant(recipe: Recipe, setting: Setting) -> Workload:
    """One variant of a model, able to be re-batched."""
    make = recipe.make(setting)
    workload = capture_step(
        make if recipe.seq_len else lambda batch: make(batch, 0),
        batch_size=recipe.batch_size,
        seq_len=recipe.seq_len or None,
        name=recipe.name,
        mode=setting.mode,
        framework_version=recipe.framework_version,
        synchronised=recipe.synchronised,
    )
    if workload.programs[0].rigid:
        raise TraincastError(f"{recipe.name} {setting}: {workload.programs[0].rigid}")
    if recipe.framework_version == STUDY_FRAMEWORK:
        workload = replace(workload, programs=tuple(split_engine_ops(program) for program in workload.programs))
    meta = {"description": recipe.description, "precision": setting.precision, "optimizer": setting.optimizer}
    if recipe.axis:
        meta[recipe.axis] = setting.choice
    return replace(workload, meta={key: value for key, value in meta.items() if value})


def build_model(recipe: Recipe, *, only_missing: bool = False) -> Iterator[tuple[Path, int]]:
    """Captures and saves every variant; gives each file and its number of ops. Files of no variant are removed.

    With `only_missing`, variants whose file is there are left as they are.
    """
    folder = DATA / recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    made = set()
    for setting in recipe.settings():
        path = folder / _build_model_file(setting)
        made.add(path)
        if only_missing and path.is_file():
            continue
        workload = capture_variant(recipe, setting)
        save_workload(workload, path)
        yield path, workload.programs[0].num_ops
    for stale in set(folder.glob("*.tc")) - made:
        stale.unlink()


def write_index() -> None:
    """Writes the list of models, from the recipes and the files that are there."""
    models = [asdict(_describe_model(recipe)) for recipe in RECIPES.values() if (DATA / recipe.name).is_dir()]
    INDEX.write_text(json.dumps({"models": models}, indent=1) + "\n", encoding="utf-8")


def _describe_model(recipe: Recipe) -> ModelInfo:
    settings = recipe.settings()
    default = load_workload(DATA / recipe.name / _build_model_file(settings[0]))
    return ModelInfo(
        name=recipe.name,
        description=recipe.description,
        batch_size=recipe.batch_size,
        seq_len=recipe.seq_len,
        parameters=recipe.parameters(),
        ops=default.programs[0].num_ops,
        axis=recipe.axis,
        choices=recipe.choices,
        optimizers=recipe.optimizers,
        files=tuple(_build_model_file(setting) for setting in settings),
    )


def _build_model_file(setting: Setting) -> str:
    return file_name(mode=setting.mode, choice=setting.choice, optimizer=setting.optimizer, precision=setting.precision)
