"""Traincast: how long will one training step of this model take on that hardware, and why?

>>> import traincast
>>> answer = traincast.predict("dlrm-default", on="v100", batch_size=2048)
>>> answer.iteration > answer.device_active > 0
True
"""

from traincast.api import load, load_trace, predict, read_trace, scaling
from traincast.version import __version__

__all__ = ["__version__", "load", "load_trace", "predict", "read_trace", "scaling"]
