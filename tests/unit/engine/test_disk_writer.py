"""The thread that writes to the disk tier."""

from __future__ import annotations

import gc
import logging
import threading
import weakref

import numpy as np
import pytest

from mlxinfer.engine.disk import DiskTier
from mlxinfer.engine.disk_format import StoredArray
from mlxinfer.engine.disk_writer import DiskJob, DiskWriter
from tests.unit.engine.test_disk import arrays, check, tier


class HeldTier(DiskTier):
    """Writes when it is let."""

    def __init__(self, folder) -> None:
        super().__init__(folder, "f1", 10**7)
        self.begun = threading.Semaphore(0)
        self.let = threading.Semaphore(0)

    def write(self, *args, **more) -> bool:
        self.begun.release()
        assert self.let.acquire(timeout=30)
        return super().write(*args, **more)


def job(*tokens: int, done=None) -> DiskJob:
    return DiskJob("k", tokens, arrays(len(tokens)), {"layers": [1, 2]}, done=done)


@pytest.fixture
def held(tmp_path):
    t = HeldTier(tmp_path / "cache")
    writer = DiskWriter(t, queue_length=1)
    yield t, writer
    t.let.release(100)
    writer.close(30)


def test_jobs_are_written_in_order_and_reported(tmp_path):
    t = tier(tmp_path)
    writer = DiskWriter(t, queue_length=10)
    done: list[tuple[int, bool]] = []
    for n in range(4):
        assert writer.submit(job(n, done=lambda ok, n=n: done.append((n, ok))))
    assert writer.flush(30)
    assert done == [(n, True) for n in range(4)]
    assert all(check(t, (n,)) for n in range(4))
    assert writer.close(30)


def test_a_full_queue_refuses_instead_of_holding_memory(held):
    t, writer = held
    assert writer.submit(job(1))
    assert t.begun.acquire(timeout=30)
    assert writer.free
    assert writer.submit(job(2))
    assert not writer.free
    assert not writer.submit(job(3))
    assert writer.refused == 1
    assert not writer.flush(0)
    t.let.release(2)
    assert writer.flush(30)
    assert (t.counters.written, writer.free) == (2, True)


def test_closing_writes_what_is_queued_and_takes_no_more(held):
    t, writer = held
    writer.submit(job(1))
    assert t.begun.acquire(timeout=30)
    writer.submit(job(2))
    t.let.release(2)
    assert writer.close(30)
    assert not writer.submit(job(3))
    assert t.counters.written == 2


def test_closing_doesnt_wait_longer_than_it_may(held):
    t, writer = held
    writer.submit(job(1))
    assert t.begun.acquire(timeout=30)
    writer.submit(job(2))
    assert not writer.close(0)
    t.let.release(2)
    assert writer.close(30)
    assert t.counters.written == 1


def test_an_entry_that_cannot_be_stored_doesnt_end_the_others(tmp_path, caplog):
    t = tier(tmp_path)
    writer = DiskWriter(t, queue_length=10)
    done: list[bool] = []

    def raising(ok: bool) -> None:
        done.append(ok)
        raise RuntimeError("the receiver is gone")

    bad = DiskJob("k", (1,), [StoredArray("x", "float99", np.zeros(1))], {}, done=raising)
    with caplog.at_level(logging.ERROR):
        writer.submit(bad)
        writer.submit(job(2, done=done.append))
        assert writer.flush(30)
    assert done == [False, True]
    assert len(caplog.records) == 2
    writer.close(30)


def test_a_written_job_is_not_kept_alive_by_the_idle_thread(tmp_path):
    writer = DiskWriter(tier(tmp_path))
    data = np.zeros(3, np.float32)
    gone = weakref.ref(data)
    writer.submit(DiskJob("k", (1,), [StoredArray("x", "float32", data)], {}))
    del data
    assert writer.flush(30)
    gc.collect()
    assert gone() is None
    writer.close(30)
