"""Imported once by the process that workers are forked from: reads what every prediction reads, so that the first
question is answered as quickly as the next."""

from __future__ import annotations

from traincast.api import predict
from traincast.pages.page import page_html
from traincast.pages.written import page_of
from traincast.serving import answering as answering
from traincast.serving import worker as worker

page_html(page_of(predict("dlrm-default", on="v100")))
