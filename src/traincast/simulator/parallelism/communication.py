"""How long ranks of a layout need for their collectives: which nodes their group is on, and seconds per message."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from traincast.costs.collectives.calls import COLLECTIVE
from traincast.costs.collectives.model import load_shipped_collectives
from traincast.costs.kernels.call import Calls
from traincast.hardware.topology import Topology
from traincast.simulator.parallelism.layout import Layout
from traincast.utils.errors import TraincastError


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
