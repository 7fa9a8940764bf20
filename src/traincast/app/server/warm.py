"""Imported once by the process that workers are forked from: reads what every prediction reads, so that the first
question is answered as quickly as the next."""

from __future__ import annotations

from traincast.app.api import predict
from traincast.app.pages.page import render_page
from traincast.app.pages.writing import make_page
from traincast.app.server import worker as worker

render_page(make_page(predict("dlrm-default", on="v100")))
