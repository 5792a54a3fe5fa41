"""The run's ledger as a log: what is appended comes back, a number is taken once, and what a later lineage went back before doesn't count."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollart.journal import Entry, Journal, LedgerDamaged, Opened, Trained
from rollart.processes import Process
from storage.objects.store import ObjectStore

PROCESS = Process("host", "kernel", 7, 1.5)


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return ObjectStore(str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}")


def trained(lineage: int, step: int, *nonces: str) -> Trained:
    return Trained(0, lineage, step, 2.5, tuple(("train/lake/0/0/0", nonce, "trained") for nonce in nonces))


def test_entries_come_back_as_they_were_appended_under_their_numbers(store: ObjectStore) -> None:
    journal = Journal(store)
    assert (journal.last(), journal.numbers(), journal.steps(), journal.batches()) == (-1, [], 0, [])
    entries: list[Entry] = [Opened(PROCESS, 1.25), trained(0, 0, "a", "b"), trained(0, 1)]
    for number, entry in enumerate(entries):
        assert not journal.has(number)
        assert journal.append(number, entry)
    assert [Journal(store).read(n) for n in journal.numbers()] == entries
    assert store.list("ledger") == [f"ledger/0000000{n}.json" for n in range(3)]
    store.write("ledger/lease.json", b"another thing")
    assert journal.last() == 2


def test_a_number_is_taken_once_however_many_race_for_it(store: ObjectStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda n: Journal(store).append(0, trained(0, n)), range(8)))
    assert won.count(True) == 1
    assert Journal(store).read(0) == trained(0, won.index(True))


def test_what_counts_is_what_no_later_lineage_went_back_before(store: ObjectStore) -> None:
    journal = Journal(store)
    opened = Opened(PROCESS, 0.0)
    kept = [trained(0, 0), trained(0, 1), trained(2, 2), trained(2, 3)]
    log: list[Entry] = [opened, kept[0], kept[1], trained(0, 2), trained(0, 3), opened, trained(1, 2), opened, kept[2], kept[3], opened]
    for number, entry in enumerate(log):
        journal.append(number, entry)
    assert journal.batches() == kept
    assert journal.steps() == 4


@pytest.mark.parametrize("spoilt", [b"", b"[]", b"{}", b'{"kind": "other"}', b'{"kind": "batch", "step": 1}', b"\xff"])
def test_an_entry_that_is_none_is_named(store: ObjectStore, spoilt: bytes) -> None:
    store.write("ledger/00000000.json", spoilt)
    with pytest.raises(LedgerDamaged, match=r"ledger/00000000.json is no entry of a run's ledger"):
        Journal(store).read(0)
