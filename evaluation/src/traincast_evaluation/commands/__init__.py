"""Commands that this distribution adds to `traincast`."""

from traincast.utils.plugins import AddedCommand

EVALUATE = AddedCommand("accuracy tables: predicted against measured", "traincast_evaluation.commands.evaluate")
