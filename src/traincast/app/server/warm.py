"""Imported once by the process that workers are forked from: reads what every prediction reads, so that the first
question is answered as quickly as the next."""

from __future__ import annotations

from traincast.app.api import predict
from traincast.app.pages.page import page_html
from traincast.app.pages.writing import page_of
from traincast.app.server import worker as worker

page_html(page_of(predict("dlrm-default", on="v100")))
