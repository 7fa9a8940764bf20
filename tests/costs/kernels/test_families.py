"""The records of the families: every part that they name is there, and nothing is imported before it is needed."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from traincast.costs.kernels.contract import KernelModel
from traincast.costs.kernels.families import BY_NAME, PROFILES, RECORDS, load_shipped_model
from traincast.costs.kernels.lower import list_registered_ops
from traincast.costs.kernels.registry import LOWERINGS

pytestmark = pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.family.name)


def test_every_part_that_a_record_names_is_there(record):
    for module in record.lowering_modules():
        import_module(module)
    if record.roofline:
        assert callable(record.roofline_seconds())


def test_a_model_is_of_its_family_and_its_profile_is_shipped(record):
    if not record.model:
        assert load_shipped_model(record.family.name) is None
        return
    assert issubclass(record.model_class(), KernelModel)
    assert record.model_class().family is record.family
    assert (PROFILES / f"{record.profile}.npz").is_file()
    assert load_shipped_model(record.family.name) is load_shipped_model(record.family.name), "read once"


def test_its_lowering_stands_in_its_package(record):
    list_registered_ops()
    modules = {function.__module__ for function in LOWERINGS.values()}
    assert set(record.lowering_modules()) <= modules
    assert BY_NAME[record.family.name] is record


def test_only_what_is_asked_for_is_loaded(record):
    if not record.roofline:
        pytest.skip("collectives are costed in another package")
    code = (
        "import sys\n"
        "from traincast.costs.kernels.families import BY_NAME\n"
        f"BY_NAME[{record.family.name!r}].roofline_seconds()\n"
        "print([m for m in sys.modules if m.startswith('traincast.costs.kernels') and "
        "m.endswith('.model')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
