"""A pytest plug-in: `@pytest.mark.traincast(on="h100", step_ms=12.5)` predicts a step and fails beyond its limits.

The step is `workload=` of the marker (a model, a file, "train.py:make_step"), or `make_step` of the test's own module.
The fixture `traincast_prediction` has what was predicted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

if TYPE_CHECKING:
    from traincast.simulator.prediction.result import Prediction

_LIMITS = {"step_ms": "iteration_ms", "memory_gb": "memory_gb", "kernels": "kernels"}
_STEP, _FIXTURE = "make_step", "traincast_prediction"


def pytest_configure(config: pytest.Config) -> None:
    """Declares the marker."""
    words = "on=GPU, step_ms=, memory_gb=, kernels=: the step of `workload` (or of this module's make_step) stays below"
    config.addinivalue_line("markers", f"traincast({words})")


@pytest.fixture
def traincast_prediction(request: pytest.FixtureRequest) -> Prediction:
    """The prediction that the marker of a test asks for; other keywords of it are fields of `Scenario`."""
    from traincast.app.api import capture, predict
    from traincast.utils.errors import TraincastError

    marker = request.node.get_closest_marker("traincast")
    if marker is None or marker.args or "on" not in marker.kwargs:
        pytest.fail("mark the test: @pytest.mark.traincast(on='h100', step_ms=12.5)", pytrace=False)
    fields: dict[str, Any] = {name: value for name, value in marker.kwargs.items() if name not in _LIMITS}
    workload = fields.pop("workload", None)
    if workload is None:
        make_step = getattr(request.module, _STEP, None)
        if make_step is None:
            pytest.fail(f"give workload=, or define {_STEP}(batch_size) in this module", pytrace=False)
        sizes = {name: fields.pop(name) for name in ("batch_size", "seq_len") if name in fields}
        workload = capture(make_step, **sizes)
    try:
        return predict(workload, **fields)
    except TraincastError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lets marked tests have the fixture, whether they name it or not."""
    marked = [item for item in items if isinstance(item, pytest.Function) and item.get_closest_marker("traincast")]
    for item in marked:
        if _FIXTURE not in item.fixturenames:
            item.fixturenames.append(_FIXTURE)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """Checks the limits of the marker before the test itself."""
    marker = pyfuncitem.get_closest_marker("traincast")
    if marker is not None:
        figures = _read_figures(cast("Prediction", pyfuncitem.funcargs[_FIXTURE]))
        for name, limit in marker.kwargs.items():
            if name in _LIMITS and figures[name] > limit:
                pytest.fail(f"{name} {figures[name]:.4g} is above {limit:g}", pytrace=False)
    return (yield)


def _read_figures(result: Prediction) -> dict[str, float]:
    return {
        "step_ms": 1e3 * result.iteration,
        "memory_gb": result.needed_bytes / 1e9,
        "kernels": float(len(result.timeline.launches)),
    }
