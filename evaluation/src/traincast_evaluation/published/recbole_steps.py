"""Training steps of RecBole's models as its trainer runs them: what the captures of `suites/captured_recbole` were made
from.

RecBole itself is imported (1.1.1, released two days after the table), with tables of random interactions of the
published sizes; of FwFM the file of the table's commit (c8451a30), which has weights for every sample. Steps are those
of PyTorch 1.8, which the table was made with: gradients are zeroed, Adam goes over parameters one by one.
`python -m traincast_evaluation.published.recbole_steps FOLDER [DATASET...]` captures anew.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from traincast.capturing import capture_step
from traincast.ir.file import save_workload

BATCH = 4096
_USER_FIELDS = {"age": 8, "gender": 3, "occupation": 22}  # of ml-1m, as those of items: 134 with padding and genres
_USERS, _ITEMS, _YEARS, _GENRES, _MOST_GENRES = 6041, 3884, 82, 19, 6  # of MovieLens 1M, padding included
_CRITEO_FIELDS, _CRITEO_NUMBERS, _CRITEO_FEATURES = 26, 13, 2_572_192


@dataclass(frozen=True, slots=True)
class Table:
    """A published data set: its `family` of models and users, items, interactions (0: it has other fields)."""

    family: str
    users: int = 0
    items: int = 0
    interactions: int = 0


TABLES = {
    "general-ml-1m": Table("General", 6034, 3124, 834_449),
    "general-books": Table("General", 40_550, 31_094, 1_181_294),
    "general-yelp": Table("General", 72_488, 43_749, 2_043_402),
    "sequential-ml-1m": Table("Sequential", 6034, 3124, 834_449),
    "sequential-books": Table("Sequential", 40_550, 31_094, 1_181_294),
    "sequential-yelp": Table("Sequential", 72_488, 43_749, 2_043_402),
    "context-ml-1m": Table("Context-aware"),
    "context-criteo": Table("Context-aware"),
}
_PAIRWISE = {"distribution": "uniform", "sample_num": 1, "alpha": 1.0, "dynamic": False, "candidate_num": 0}
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "General": {
        **{name: {} for name in ("BPR", "NeuMF", "DMF", "NAIS", "FISM", "GCMC", "NGCF", "LightGCN", "DGCF")},
        **{name: {} for name in ("LINE", "ENMF", "SimpleX", "SpectralCF", "ConvNCF", "NNCF")},
        **{name: {"train_neg_sample_args": None} for name in ("MultiVAE", "MultiDAE", "MacridVAE", "CDAE")},
    },
    "Sequential": {
        name: {}
        for name in (
            "BERT4Rec", "CORE", "Caser", "FOSSIL", "GCSAN", "GRU4Rec", "HGN", "HRM", "LightSANs",
            "NARM", "NPE", "NextItNet", "RepeatNet", "SASRec", "SHAN", "SINE", "SRGNN", "STAMP",
        )
    }
    | {name: {"loss_type": "BPR", "train_neg_sample_args": _PAIRWISE} for name in ("FPMC", "TransRec")},
    "Context-aware": {
        **{name: {} for name in ("AFM", "AutoInt", "DCN", "DeepFM", "FFM", "FM", "FNN", "FwFM", "LR", "NFM", "PNN")},
        **{name: {} for name in ("DSSM", "WideDeep", "xDeepFM")},
        "DCNV2": {"mixed": False, "structure": "stacked"},
    },
}  # fmt: skip
"""Models of every family, with what their published configuration sets."""


def _write_rows(path: Path, columns: dict[str, np.ndarray[Any, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ("\t".join(map(str, row)) for row in zip(*(column.tolist() for column in columns.values()), strict=True))
    path.write_text("\n".join(("\t".join(columns), *lines)) + "\n")


def write_table(name: str, folder: Path) -> None:
    """Writes a data set with RecBole's column names: every user, item and value of a field at least once."""
    table, rng = TABLES[name], np.random.default_rng(0)
    inter = folder / name / f"{name}.inter"
    if name == "context-ml-1m":
        _write_movies(inter, rng)
        return
    if table.family == "Context-aware":
        rows, wide = 1_000_000, _CRITEO_FEATURES // _CRITEO_FIELDS
        columns: dict[str, Any] = {f"c{i}:token": np.arange(rows) % (wide - 1) for i in range(_CRITEO_FIELDS)}
        columns |= {f"i{i}:float": rng.random(rows) for i in range(_CRITEO_NUMBERS)}
        _write_rows(inter, {**columns, "label:float": rng.integers(0, 2, rows)})
        return
    # sequences of 50 hold the last items of a user whatever there is of them
    count = table.interactions if table.family == "General" else 4 * max(table.users, table.items)
    users = np.concatenate((np.arange(count) % (table.users - 1),))
    items = np.concatenate((np.arange(count) % (table.items - 1),))
    rng.shuffle(items[table.items :])
    _write_rows(
        inter, {"user_id:token": users, "item_id:token": items, "timestamp:float": np.arange(count, dtype=np.float64)}
    )


def _write_movies(inter: Path, rng: np.random.Generator) -> None:
    """MovieLens 1M with what it says of users and movies: up to six genres each."""
    rows, users, items = 20_000, np.arange(_USERS - 1), np.arange(_ITEMS - 1)
    _write_rows(
        inter,
        {"user_id:token": np.arange(rows) % len(users), "item_id:token": np.arange(rows) % len(items),
         "label:float": rng.integers(0, 2, rows)},
    )  # fmt: skip
    fields = {f"{field}:token": users % (count - 1) for field, count in _USER_FIELDS.items()}
    _write_rows(inter.with_suffix(".user"), {"user_id:token": users, **fields})
    genres = [" ".join(str((i + k) % (_GENRES - 1)) for k in range(1 + i % _MOST_GENRES)) for i in items.tolist()]
    _write_rows(
        inter.with_suffix(".item"),
        {"item_id:token": items, "release_year:token": items % (_YEARS - 1), "genre:token_seq": np.array(genres)},
    )


def _configure(name: str, model: str, folder: Path) -> Any:
    from recbole.config import Config

    table = TABLES[name]
    options: dict[str, Any] = {
        "data_path": str(folder), "train_batch_size": BATCH, "show_progress": False, "state": "ERROR",
        "embedding_size": 16 if table.family == "Context-aware" else 64, "worker": 0,
        **MODELS[table.family][model],
    }  # fmt: skip
    if table.family == "Context-aware":
        kept = [f"c{i}" for i in range(_CRITEO_FIELDS)] + [f"i{i}" for i in range(_CRITEO_NUMBERS)]
        criteo = {"USER_ID_FIELD": kept[0], "ITEM_ID_FIELD": kept[1], "load_col": {"inter": [*kept, "label"]}}
        movies = {
            "inter": ["user_id", "item_id", "label"], "user": ["user_id", *_USER_FIELDS],
            "item": ["item_id", "genre", "release_year"],
        }  # fmt: skip
        options |= criteo if name.endswith("criteo") else {"load_col": movies}
        options |= {
            "eval_args": {"split": {"RS": [0.8, 0.1, 0.1]}, "order": "RO", "group_by": None, "mode": "labeled"},
            "train_neg_sample_args": None, "normalize_all": False, "metrics": ["AUC"], "valid_metric": "AUC",
        }  # fmt: skip
    else:
        options |= {"load_col": {"inter": ["user_id", "item_id", "timestamp"]}}
        if table.family == "Sequential":
            options = {"MAX_ITEM_LIST_LENGTH": 50, "train_neg_sample_args": None, "loss_type": "CE"} | options
    argv, sys.argv = sys.argv, sys.argv[:1]
    try:
        return Config(model=model, dataset=name, config_dict=options)
    finally:
        sys.argv = argv


def make_step(config: Any, data: Any, model: str) -> Callable[[], None]:
    """A step of RecBole's trainer on one batch of its loader."""
    from recbole.utils import get_model

    batch = next(iter(data))
    config["device"] = torch.device("cuda")
    net = get_model(model)(config, data.dataset).to("cuda")
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, foreach=False)

    def step() -> None:
        interaction = batch.to("cuda")
        optimizer.zero_grad(set_to_none=False)
        losses = net.calculate_loss(interaction)
        loss: Any = sum(losses) if isinstance(losses, tuple) else losses
        total = loss.item()  # noqa: F841
        loss.backward()
        optimizer.step()

    return step


def _stand_in_for_older_libraries() -> None:
    """Names that RecBole takes from older NumPy and SciPy, and from TensorBoard, which a step does not need."""
    matrix: Any = import_module("scipy.sparse").dok_matrix
    if not hasattr(matrix, "_update"):
        matrix._update = lambda self, entries: self._dict.update(entries)
    board = ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = object  # type: ignore[attr-defined]
    sys.modules.setdefault("torch.utils.tensorboard", board)
    for name, now in {
        "float_": "float64",
        "complex_": "complex128",
        "unicode_": "str_",
        "bool8": "bool_",
        "bool": "bool_",
        "int": "int64",
    }.items():
        if not hasattr(np, name):
            setattr(np, name, getattr(np, now))


def capture_table(name: str, folder: Path) -> None:
    """Captures every model of a data set's family into a folder; prints why one cannot be."""
    _stand_in_for_older_libraries()
    from recbole.data import create_dataset, data_preparation

    with tempfile.TemporaryDirectory() as scratch:
        write_table(name, Path(scratch))
        shared: Any = None  # rows of one form serve all context-aware models
        for model in MODELS[TABLES[name].family]:
            target = folder / f"{name}-{model}.tc"
            if target.exists():
                continue
            try:
                config = _configure(name, model, Path(scratch))
                data = shared or data_preparation(config, create_dataset(config))[0]
                shared = data if TABLES[name].family == "Context-aware" else None
                workload = capture_step(
                    lambda batch, config=config, data=data, model=model: make_step(config, data, model),
                    batch_size=BATCH, name=f"recbole-{name}-{model}", rebatch=False,
                )  # fmt: skip
            except Exception as error:  # another library's models fail in their own ways
                print(f"{name} {model}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            save_workload(workload, target)
            print(f"{name} {model} captured", flush=True)


if __name__ == "__main__":
    for one in sys.argv[2:] or TABLES:
        capture_table(one, Path(sys.argv[1]))
