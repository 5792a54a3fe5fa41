"""Trajectories on disk: what is written comes back, receipts hold to their execution, and fates can be joined and compacted."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollart.control.cut import Settlement
from rollart.rollout.flush_pace import FlushPace
from rollart.rollout.reader import StoredTrajectories
from rollart.rollout.records import FLUSHED, RecordMissing, RecordsDamaged, decode, encode
from rollart.rollout.tables import abandon_after, compact, evaluation_rows, score_table, settlement_rows, write_fates
from rollart.rollout.writer import TrajectoryWriter
from rollart.types import Attempt, Batch, Episode, Group, KeptSets, Member, Purpose, Receipt, SamplingTransform, Score, Segment, Trajectory
from storage.objects.store import ObjectStore


def play(index: int, member: int = 0, version: int = 0, purpose: Purpose = "train") -> Trajectory:
    segment = Segment(SamplingTransform(0.6))
    segment.append_prompt([5, 6, 7])
    segment.append_response([8, index], [-0.25, -1.5], [version, version], "stop", cached_tokens=2)
    segment.reward_last_turn(0.5)
    attempt = Attempt(Episode("lake", index, purpose), member)
    return Trajectory(attempt, f"n{index}-{member}-{purpose}-{version}", 0, 99, [segment], "terminated", {"deep": [1, {"a": None}]}, {"total": 2.5})


async def kept(store: ObjectStore, trajectories: list[Trajectory]) -> list[Member]:
    writer = TrajectoryWriter(store, FlushPace(0.01, 1000))
    members = []
    for t in trajectories:
        file, row = await writer.write(t)
        first, last = t.version_span
        receipt = Receipt(t.attempt, t.nonce, 0, file, row, t.outcome, first, last, 5, 2, 1, t.seconds)
        members.append(Member(receipt, Score(t.attempt, t.nonce, float(t.attempt.member))))
    return members


def test_a_trajectory_survives_parquet_whole() -> None:
    trajectories = [play(1), play(2, member=3, version=7)]
    assert decode(encode(trajectories)) == trajectories


def test_kept_sets_survive_parquet_and_a_compaction_as_differences(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    played = [play(i) for i in range(4)]
    for t in played:
        segment = Segment(SamplingTransform(top_k=20))
        sets = np.sort(np.array([rng.permutation(4096)[:20] for _ in range(50)]))
        segment.append_response(sets[:, 7].tolist(), [-0.5] * 50, [0] * 50, "stop", kept=KeptSets.of(sets.ravel(), [20] * 50))
        t.segments.append(segment)
    data = encode(played)
    assert decode(data) == played
    store = ObjectStore(str(tmp_path))
    store.write(f"{FLUSHED}/0-a-0.parquet", data)
    assert compact(str(tmp_path)) == 4
    (part,) = store.list("trajectories")
    compacted = store.read(part)
    assert sorted(decode(compacted), key=lambda t: t.attempt) == played
    for held in (data, compacted):
        group = pq.ParquetFile(io.BytesIO(held)).metadata.row_group(0)
        (column,) = [c for c in map(group.column, range(group.num_columns)) if c.path_in_schema.endswith("kept.list.element")]
        assert "DELTA_BINARY_PACKED" in column.encodings and column.total_compressed_size < 2 * 4 * 50 * 20  # two bytes an id


def test_a_file_written_before_there_were_kept_sets_is_read_and_compacted_with_newer_ones(tmp_path: Path) -> None:
    old, new = play(1), play(2)
    table = pq.read_table(io.BytesIO(encode([old])))
    segments = pa.array([[{k: v for k, v in s.items() if not k.startswith("kept")} for s in row] for row in table["segments"].to_pylist()])
    sink = io.BytesIO()
    pq.write_table(table.set_column(table.schema.get_field_index("segments"), "segments", segments), sink)
    assert decode(sink.getvalue()) == [old]
    store = ObjectStore(str(tmp_path))
    store.write(f"{FLUSHED}/0-a-0.parquet", sink.getvalue())
    store.write(f"{FLUSHED}/1-a-0.parquet", encode([new]))
    assert compact(str(tmp_path)) == 2
    (part,) = store.list("trajectories")
    assert sorted(decode(store.read(part)), key=lambda t: t.attempt) == [old, new]


async def test_receipts_read_back_their_execution_in_their_order_and_no_other(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path))
    played = [play(i) for i in range(5)]
    receipts = [m.receipt for m in await kept(store, played)]
    reader = StoredTrajectories(str(tmp_path), keep=1)
    assert reader(receipts[::-1]) == played[::-1]
    other = Receipt(receipts[0].attempt, "another", 0, receipts[0].file, receipts[0].row, "terminated", 0, 0, 5, 2, 1)
    with pytest.raises(RecordMissing, match="not the execution"):
        reader([other])


async def test_a_file_that_is_cut_short_is_named_where_a_receipt_points_to_it(tmp_path: Path) -> None:
    (member,) = await kept(ObjectStore(str(tmp_path)), [play(1)])
    file = tmp_path / member.receipt.file
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(RecordsDamaged, match=rf"{member.receipt.file} is no whole Parquet file"):
        StoredTrajectories(str(tmp_path)).read(member.receipt)


def test_a_file_of_somebody_elses_among_the_fates_is_named(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path))
    store.write("trajectories/fates/notes.txt", b"mine")
    with pytest.raises(RecordsDamaged, match=r"trajectories/fates/notes.txt is not named as a run names its files; remove it"):
        abandon_after(store, 0)


async def test_writes_that_come_together_share_a_file(tmp_path: Path) -> None:
    import asyncio

    store = ObjectStore(str(tmp_path))
    writer = TrajectoryWriter(store, FlushPace(60.0, 8))  # only the count can flush
    places = await asyncio.gather(*(writer.write(play(i)) for i in range(8)))
    assert len({file for file, _ in places}) == 1 and sorted(row for _, row in places) == list(range(8))


async def test_a_store_that_fails_fails_each_trajectory_of_the_batch(tmp_path: Path) -> None:
    import asyncio

    class Full(ObjectStore):
        def write(self, path: str, data: object) -> None:
            raise OSError("no space left on device")

    writer = TrajectoryWriter(Full(str(tmp_path)), FlushPace(0.01, 8))
    results = await asyncio.gather(*(writer.write(play(i)) for i in range(3)), return_exceptions=True)
    assert [str(r) for r in results] == ["no space left on device"] * 3


async def test_fates_join_trajectories_before_and_after_compaction(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path))
    members = await kept(store, [play(0, 0), play(0, 1), play(1, 0, purpose="evaluate"), play(9)])
    batch = Batch(0, 2, (Group(members[0].receipt.attempt.episode, tuple(members[:2])),))
    fates = [(m.receipt.attempt, m.receipt.nonce, "trained") for m in members[:2]]
    lost = (Attempt(Episode("lake", 4), 0), "", "failed")
    write_fates(store, "train", 0, 2, settlement_rows(batch, Settlement([*fates, lost])))
    write_fates(store, "evaluate", 0, 0, evaluation_rows(members[2:3], 0, 0))
    before = score_table(str(tmp_path)).sort_values(["purpose", "episode", "member"]).reset_index(drop=True)
    assert before[["purpose", "episode", "member", "fate"]].fillna("-").to_numpy().tolist() == [
        ["evaluate", 1, 0, "evaluated"], ["train", 0, 0, "trained"], ["train", 0, 1, "trained"], ["train", 9, 0, "-"],
    ]  # fmt: skip
    assert before.staleness.tolist()[1:3] == [2, 2] and before.score.tolist()[1:3] == [0.0, 1.0]
    assert compact(str(tmp_path)) == 4
    after = score_table(str(tmp_path)).sort_values(["purpose", "episode", "member"]).reset_index(drop=True)
    assert store.list("trajectories/flushed") == []
    columns = ["task", "episode", "member", "nonce", "score", "fate", "version", "staleness", "tokens"]
    assert after[columns].astype(str).equals(before[columns].astype(str))
    assert compact(str(tmp_path)) == 0


async def test_compaction_leaves_what_is_undecided_where_it_is_and_adds_it_later(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path))
    members = await kept(store, [play(i) for i in range(3)])
    waiting = members[1].receipt
    assert compact(str(tmp_path), undecided={waiting.nonce}) == 2
    assert store.list("trajectories/flushed") == [waiting.file]
    assert StoredTrajectories(str(tmp_path)).read(waiting).nonce == waiting.nonce
    assert sorted(score_table(str(tmp_path)).episode) == [0, 1, 2]
    batch = Batch(0, 2, (Group(waiting.attempt.episode, (members[1],)),))
    write_fates(store, "train", 0, 2, settlement_rows(batch, Settlement([(waiting.attempt, waiting.nonce, "trained")])))
    assert compact(str(tmp_path)) == 1
    assert store.list("trajectories/flushed") == []
    assert [p for p in store.list("trajectories") if p.count("/") == 1] == ["trajectories/part-00000.parquet", "trajectories/part-00001.parquet"]
    table = score_table(str(tmp_path)).sort_values("episode")
    assert table.fate.fillna("-").tolist() == ["-", "trained", "-"]


async def test_what_an_abandoned_tail_used_is_marked(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path))
    members = await kept(store, [play(i) for i in range(3)])
    for step, member in enumerate(members):
        batch = Batch(0, step, (Group(member.receipt.attempt.episode, (member,)),))
        write_fates(store, "train", 0, step, settlement_rows(batch, Settlement([(member.receipt.attempt, member.receipt.nonce, "trained")])))
        write_fates(store, "evaluate", 0, step, [])
    assert abandon_after(store, 1) == 2
    table = score_table(str(tmp_path)).sort_values("episode")
    assert table.fate.tolist() == ["trained", "lineage", "lineage"]


async def test_what_two_lineages_used_has_the_fate_of_the_later_one(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path))
    (member,) = await kept(store, [play(0)])
    batch = Batch(9, 3, (Group(member.receipt.attempt.episode, (member,)),))
    for lineage, fate in ((9, "lineage"), (10, "trained")):  # by name, the file of lineage 10 comes before that of 9
        settled = [(member.receipt.attempt, member.receipt.nonce, fate)]
        write_fates(store, "train", lineage, 3, settlement_rows(replace(batch, lineage=lineage), Settlement(settled)))
    assert score_table(str(tmp_path)).fate.tolist() == ["trained"]


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path))
    for spoilt in (b"", b"PAR1", b"PAR1 and more, PAR1"):
        store.write("trajectories/fates/train-0-00000000.parquet", spoilt)
        store.write("trajectories/part-00000.parquet", spoilt)
        with pytest.raises(RecordsDamaged, match=r"trajectories/part-00000.parquet is no whole Parquet file .* remove it"):
            score_table(str(tmp_path))
        with pytest.raises(RecordsDamaged, match=r"fates/train-0-00000000.parquet is no whole Parquet file"):
            abandon_after(store, 0)
