"""What stands in for parts of TorchRec that recorders could not follow."""

import threading

import pytest

pytest.importorskip("torch")

from traincast.capturing.torchrec_steps import _CallersThread


def test_work_given_to_a_pool_is_done_where_it_is_given():
    pool = _CallersThread(max_workers=1)
    assert pool.submit(threading.get_ident).result() == threading.get_ident()
    pool.shutdown(wait=False)


def test_what_goes_wrong_is_told_where_the_result_is_asked_for():
    failed = _CallersThread().submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failed.result()
