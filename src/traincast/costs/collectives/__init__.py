"""Collectives over a topology: calls, curves fitted to measurements, and links where nothing was measured."""

from traincast.costs.collectives.calls import COLLECTIVE, bus_factor, even_bytes
from traincast.costs.collectives.model import CollectiveModel, shipped_collectives

__all__ = ["COLLECTIVE", "CollectiveModel", "bus_factor", "even_bytes", "shipped_collectives"]
