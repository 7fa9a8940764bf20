"""The recommenders alongside DLRM as they are captured: sizes, inputs, targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from traincast.models.dlrm.config import CRITEO_ROWS
from traincast_evaluation.zoo.build.steps import Inputs, Setting
from traincast_evaluation.zoo.define.embeddings import FbgemmTables
from traincast_evaluation.zoo.define.recommenders import (
    DENSE_FEATURES,
    DIN_ROWS,
    DeepFM,
    Din,
    Ncf,
    Recommender,
    WideAndDeep,
)
from traincast_evaluation.zoo.define.sequences import Hstu, HstuConfig, OneTrans, OneTransConfig

_NEGATIVES = HstuConfig().negatives


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A recommender: how it is built for an optimizer, and its batch of inputs and targets."""

    name: str
    description: str
    batch_size: int
    build: Callable[[str], Recommender]
    batch: Callable[[Setting], tuple[Inputs, Inputs]]
    seq_len: int = 0

    def parameters(self) -> int:
        """Of the whole model, every row of every table counted."""
        with torch.device("meta"):
            model = self.build("sgd")
        tables = [module for module in model.modules() if isinstance(module, FbgemmTables)]
        fused = sum(sum(table.rows) * table.dims[0] for table in tables)
        return fused + sum(parameter.numel() for parameter in model.dense_parameters())


def _make_ids(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64, device="cuda")


def _make_clicks(batch: int, _: int) -> tuple[torch.Tensor, ...]:
    return (torch.zeros(batch, 1, device="cuda"),)


def _make_criteo_inputs(setting: Setting) -> tuple[Inputs, Inputs]:
    """13 numbers and one lookup in each of 26 tables."""

    def inputs(batch: int, _: int) -> tuple[torch.Tensor, ...]:
        dense = torch.zeros(batch, DENSE_FEATURES, dtype=setting.input_dtype, device="cuda")
        lookups = batch * len(CRITEO_ROWS)
        return dense, _make_ids(lookups), _make_ids(lookups + 1)

    return inputs, _make_clicks


def _make_din_inputs(setting: Setting) -> tuple[Inputs, Inputs]:
    def inputs(batch: int, length: int) -> tuple[torch.Tensor, ...]:
        lookups = batch * (length + 1) * len(DIN_ROWS)
        return (
            _make_ids(lookups),
            _make_ids(lookups + 1),
            torch.zeros(batch, length, dtype=setting.input_dtype, device="cuda"),
        )

    return inputs, _make_clicks


def _make_ncf_inputs(_: Setting) -> tuple[Inputs, Inputs]:
    return lambda batch, _: (_make_ids(batch), _make_ids(batch)), _make_clicks


def _make_hstu_inputs(setting: Setting) -> tuple[Inputs, Inputs]:
    """Every history at its full length: an item and a place for each action, the item that followed, and others."""

    def inputs(batch: int, length: int) -> tuple[torch.Tensor, ...]:
        tokens = batch * length
        lookups = 2 * tokens + _NEGATIVES
        mask = torch.zeros(length, length, dtype=setting.input_dtype, device="cuda")
        return _make_ids(lookups), _make_ids(lookups + 1), _make_ids(tokens), _make_ids(batch + 1), mask

    return inputs, lambda batch, length: (_make_ids(batch * length),)


def _make_one_trans_inputs(_: Setting) -> tuple[Inputs, Inputs]:
    def inputs(batch: int, length: int) -> tuple[torch.Tensor, ...]:
        lookups = batch * len(OneTransConfig().features)
        return (
            _make_ids(batch * length),
            _make_ids(batch * length + 1),
            _make_ids(lookups),
            _make_ids(lookups + 1),
            _make_ids(length),
        )

    return inputs, _make_clicks


RECOMMENDERS = (
    Family(
        name="hstu", batch_size=32, seq_len=512, build=Hstu, batch=_make_hstu_inputs,
        description="HSTU generative recommender: 8 layers of jagged attention without softmax, unpooled items",
    ),
    Family(
        name="onetrans", batch_size=64, seq_len=256, build=OneTrans, batch=_make_one_trans_inputs,
        description="a Transformer like OneTrans: behaviour and 32 features in one causal sequence",
    ),
    Family(
        name="din", batch_size=2048, seq_len=100, build=Din, batch=_make_din_inputs,
        description="Deep Interest Network: an unpooled history weighted by the item on offer",
    ),
    Family(
        name="deepfm", batch_size=8192, build=DeepFM, batch=_make_criteo_inputs,
        description="DeepFM as TorchRec's SimpleDeepFMNN on Criteo's 26 tables",
    ),
    Family(
        name="wide-deep", batch_size=8192, build=WideAndDeep, batch=_make_criteo_inputs,
        description="Wide & Deep on Criteo's 26 tables",
    ),
    Family(
        name="ncf", batch_size=65536, build=lambda _: Ncf(), batch=_make_ncf_inputs,
        description="neural collaborative filtering (NeuMF) of MLPerf: MovieLens 20M, dense gradients of its tables",
    ),
)  # fmt: skip
