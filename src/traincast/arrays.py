"""The array types that every room speaks in."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Int32Array = npt.NDArray[np.int32]
IntArray = npt.NDArray[np.int64]
IndexArray = npt.NDArray[np.intp]
"""Positions, as numpy's own sorts and searches give them."""
