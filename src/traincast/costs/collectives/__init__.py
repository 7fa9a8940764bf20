"""Collectives over a topology: calls, curves fitted to measurements, and links where nothing was measured."""

from traincast.costs.collectives.links import get_bus_factor, share_bytes_evenly
from traincast.costs.collectives.model import CollectiveModel, load_shipped_collectives
from traincast.costs.kernels.collective import COLLECTIVE

__all__ = ["COLLECTIVE", "CollectiveModel", "get_bus_factor", "load_shipped_collectives", "share_bytes_evenly"]
