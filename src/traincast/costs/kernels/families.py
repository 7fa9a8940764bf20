"""Every kernel family, in the order in which they are fitted and evaluated.

From these records follow the ops that are lowered (`kernels.lower`), the rooflines, the shipped models, the pieces of
`traincast fit` and the suites of `traincast evaluate kernels`.
"""

from __future__ import annotations

from traincast.costs.kernels import (
    attention,
    collective,
    conv,
    embedding,
    gemm,
    given,
    recurrent,
    rowwise,
    streaming,
    unmodelled,
)
from traincast.costs.kernels.record import FamilyRecord

RECORDS: tuple[FamilyRecord, ...] = (
    gemm.RECORD,
    *streaming.RECORDS,
    *rowwise.RECORDS,
    conv.RECORD,
    attention.RECORD,
    embedding.RECORD,
    recurrent.RECORD,
    *unmodelled.RECORDS,
    *given.RECORDS,
    collective.RECORD,
)
BY_NAME: dict[str, FamilyRecord] = {record.family.name: record for record in RECORDS}
