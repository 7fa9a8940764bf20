"""For developers of Traincast who have the measurements: accuracy tables and fits of the shipped profiles.

>>> import traincast_evaluation
>>> callable(traincast_evaluation.evaluate) and callable(traincast_evaluation.fit)
True
"""

from traincast_evaluation.api import evaluate, fit

__all__ = ["evaluate", "fit"]
