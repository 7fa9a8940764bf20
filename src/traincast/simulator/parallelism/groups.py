"""Which ranks communicate with which under a layout, how its layers are run, and how long their collectives take.

Ranks are numbered as Megatron and torchtitan do: tensor-parallel ones are neighbours, then those of a sample, then
data-parallel ones; stages are farthest apart. Experts are spread over neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from traincast.costs.collectives.model import load_shipped_collectives
from traincast.costs.kernels.collective import COLLECTIVE
from traincast.costs.kernels.contract import Calls
from traincast.hardware.topology import Topology
from traincast.models.layers.builder import Communicator
from traincast.models.transformers.description import Experts, Transformer
from traincast.models.transformers.program.style import NARROW_TYPES, LayerGroups, Shard, Style
from traincast.simulator.parallelism.layout import PYTORCH, Layout
from traincast.utils.errors import TraincastError

TENSOR, SAMPLE, EXPERT, DATA, SEND_FORWARD, RECEIVE_FORWARD, SEND_BACKWARD, RECEIVE_BACKWARD = range(1, 9)
"""Numbers of communicators, and of the streams that their collectives run on."""

NAMES = {TENSOR: "tp", SAMPLE: "cp", EXPERT: "ep", DATA: "dp", SEND_FORWARD: "pp", SEND_BACKWARD: "pp"}
"""What a communicator is called in results."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The rank groups of a layout, each as the group of rank 0."""

    layout: Layout

    def among(self, number: int, ranks: int, stride: int) -> Communicator | None:
        """`ranks` ranks that are `stride` apart; None for one alone."""
        return Communicator(number, tuple(range(0, ranks * stride, stride))) if ranks > 1 else None

    @property
    def sharing(self) -> Communicator | None:
        """Ranks that share parameters, gradients or the optimizer."""
        return self.among(DATA, self.layout.sharing, self.layout.tp)

    @property
    def data(self) -> Communicator | None:
        """Data-parallel ranks, those of a sample's parts included: they hold the same weights."""
        return self.among(DATA, self.layout.dp * self.layout.cp, self.layout.tp)

    @property
    def copies(self) -> Communicator | None:
        """Ranks that hold the same shard in groups that each hold all (hybrid sharding)."""
        layout = self.layout
        return self.among(DATA, layout.dp * layout.cp // layout.sharing, layout.tp * layout.sharing)

    @property
    def expert_data(self) -> Communicator | None:
        """Ranks that hold the same experts."""
        inner = self.layout.ep * self.layout.etp
        return self.among(DATA, self.layout.gpus // self.layout.pp // inner, inner)

    def first_rank(self, stage: int) -> int:
        """The first rank of a stage."""
        return stage * (self.layout.gpus // self.layout.pp)

    def in_layers(self, model: Transformer, gpus_per_node: int) -> LayerGroups:
        """The groups that layers communicate in."""
        layout = self.layout
        experts = model.experts if layout.ep * layout.etp > 1 else None
        return LayerGroups(
            tp=self.among(TENSOR, layout.tp, 1),
            cp=self.among(SAMPLE, layout.cp, layout.tp),
            ep=self.among(EXPERT, layout.ep, layout.etp) if experts is not None else None,
            overlap_tp=layout.overlap_tp,
            hidden_tp=1 - 1 / layout.tp,  # GEMMs in as many parts as ranks: all but the first part's collective
            token_bytes=1 if layout.quantised_tokens else 2,
            cp_gather=layout.cp_exchange == "gather",
            dispatched=count_token_copies(layout, experts, gpus_per_node) if experts is not None else 0.0,
            overlap_ep=layout.overlap_ep,
            sorted_by_dispatch=layout.dispatch == "once",  # DeepEP and HybridEP
            in_graph=layout.kernels == "graph",
            counts_on_host=experts is not None and layout.kernels != "graph" and not experts.capacity,
        )


def count_token_copies(layout: Layout, experts: Experts, gpus_per_node: int) -> float:
    """Copies of a token that leave for experts: one for each, or ("once") one for each node, or for each rank where all
    are on one node, that holds any of them; experts are drawn evenly, but for what the busiest rank gets more."""
    if layout.dispatch == "each":
        return layout.expert_imbalance * experts.top_k
    nodes = -(-layout.ep // max(1, gpus_per_node // layout.etp))
    places = nodes if nodes > 1 else layout.ep
    return layout.expert_imbalance * places * (1 - (1 - 1 / places) ** experts.top_k)


def make_shard(layout: Layout) -> Shard:
    """What one rank holds of a micro-batch and of a layer."""
    return Shard(
        batch=layout.micro_batch,
        seq_len=layout.seq_len,
        tp=layout.tp,
        sequence=layout.sequence and layout.tp > 1,
        cp=layout.cp,
        by_heads=layout.cp > 1 and layout.cp_exchange == "all-to-all",
        ep=layout.ep,
        etp=layout.etp,
        document=layout.document_len,
        imbalance=layout.expert_imbalance,
    )


def make_style(layout: Layout) -> Style:
    """How kernels are run under a layout."""
    return Style(
        precision=layout.precision,
        attention=layout.attention,
        ring=layout.cp > 1 and layout.cp_exchange != "all-to-all" and layout.kernels in PYTORCH,
        tuned=layout.kernels not in PYTORCH,
        fused=layout.kernels != "eager",
        together=layout.kernels in ("compiled", "graph"),
        graphed=layout.graphed,
        joined=bool(layout.joined),
        autocast=layout.gather_bytes == 4 and layout.precision not in ("fp32", "tf32"),
        wide=layout.autocast,
        dropout=layout.dropout,
        accumulate="epilogue" if layout.kernels in ("fused", "graph") else "first",
        compiled_loss=layout.kernels == "compiled",
        loss_by_ops=layout.kernels == "fused" and layout.attention == "unfused",  # Megatron before 2023
        exact_gradients=layout.reduce_bytes == 4,
        wide_gradients=layout.wide_gradients,
        scaling=layout.scaling,
        quantised_weights=layout.precision in NARROW_TYPES and layout.sharding == "zero3",
        frozen=layout.adapter_rank > 0,
        adapter_rank=layout.adapter_rank,
        adapts_all=layout.adapters == "all",
    )


def make_head_style(layout: Layout) -> Style:
    """How kernels of the last norm, the projection to words and the loss are run."""
    style = make_style(layout)
    return replace(style, fused=False, compiled_loss=False) if layout.loss == "eager" else style


class CommunicationCosts:
    """Prices of the collectives of one layout on one topology.

    Ranks are numbered as Megatron and torchtitan do: tensor-parallel ones are neighbours, then those of a sample, then
    data-parallel ones; stages are farthest apart. Experts are spread over neighbours.
    """

    def __init__(self, layout: Layout, topology: Topology | None) -> None:
        self.layout, self.topology = layout, topology

    def tensor(self, kind: str, nbytes: float) -> float:
        """Among tensor-parallel ranks."""
        return self._price(kind, nbytes, self.layout.tp, 1)

    def sample(self, kind: str, nbytes: float) -> float:
        """Among ranks that share the tokens of a sample."""
        return self._price(kind, nbytes, self.layout.cp, self.layout.tp)

    def experts(self, kind: str, nbytes: float) -> float:
        """Among ranks that share experts."""
        return self._price(kind, nbytes, self.layout.ep, self.layout.etp)

    def data(self, kind: str, nbytes: float, *, ranks: int | None = None) -> float:
        """Among data-parallel ranks, or the first `ranks` of them."""
        return self._price(kind, nbytes, ranks or self.layout.dp * self.layout.cp, self.layout.tp)

    def copies(self, kind: str, nbytes: float) -> float:
        """Among groups that each hold a whole set of shards (hybrid sharding)."""
        layout = self.layout
        return self._price(kind, nbytes, layout.dp * layout.cp // layout.sharing, layout.tp * layout.sharing)

    def expert_data(self, kind: str, nbytes: float) -> float:
        """Among ranks that hold the same experts."""
        layout = self.layout
        inner = layout.ep * layout.etp
        return self._price(kind, nbytes, layout.gpus // layout.pp // inner, inner)

    def stages(self, nbytes: float) -> float:
        """From a stage to the next."""
        layout = self.layout
        return self._price("send_recv", nbytes, 2 if layout.pp > 1 else 1, layout.gpus // layout.pp)

    def _price(self, kind: str, nbytes: float, ranks: int, stride: int) -> float:
        if ranks < 2 or nbytes <= 0:
            return 0.0
        if self.topology is None:
            raise TraincastError(
                "the platform says nothing of the links between its GPUs; name a node such as dgx-h100, or describe one"
            )
        return price_collective(
            self.topology, kind, float(nbytes), ranks, count_group_nodes(ranks, stride, self.topology)
        )


def count_group_nodes(ranks: int, stride: int, topology: Topology) -> int:
    """Nodes that a group of `ranks` is on whose members are `stride` apart."""
    per_node = max(1, topology.gpus_per_node // stride)
    return -(-ranks // per_node)


@lru_cache(maxsize=65536)
def price_collective(topology: Topology, kind: str, nbytes: float, ranks: int, nodes: int) -> float:
    """Seconds of one collective."""
    values = np.array([[nbytes, float(ranks), float(nodes)]])
    estimate = load_shipped_collectives().predict(Calls.from_columns(COLLECTIVE, [kind], ["bf16"], values), topology)
    return float(estimate.seconds[0])
