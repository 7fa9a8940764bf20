"""TorchRec both ways: its table configs and sharding plans as JSON, its own objects, its planner.

JSON is read and written without TorchRec; `objects`, `planner` and `estimator` need the extra `torchrec`.
"""

from traincast.planner.torchrec.plans import load_plan, plan_from_json, plan_to_json
from traincast.planner.torchrec.tables import (
    ModuleTables,
    default_modules,
    load_tables_json,
    tables_from_json,
    tables_to_json,
)

__all__ = [
    "ModuleTables",
    "default_modules",
    "load_plan",
    "load_tables_json",
    "plan_from_json",
    "plan_to_json",
    "tables_from_json",
    "tables_to_json",
]
