"""What became of every trajectory, as tables: fate files as a run writes them, one joined table for readers, and compaction."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from rollart.control.cut import Settlement
from rollart.rollout.records import (
    COMPACTED,
    FATE_SCHEMA,
    FATES,
    FLUSHED,
    SCHEMA,
    RecordsDamaged,
    attempt_columns,
    compacted_files,
    parquet_of,
    read_table,
)
from rollart.types import Batch, Member
from storage.objects.store import ObjectStore

_FATE_NAME = re.compile(r"(?P<kind>train|evaluate)-[0-9]+-(?P<step>[0-9]+)\.parquet")

ROWS_A_FILE = 20_000
"""Trajectories in a compacted file: some tens of megabytes, which readers can still hold."""

_KEY = ["purpose", "task", "episode", "member", "attempt", "nonce"]
_PLAIN = [f.name for f in SCHEMA if f.name not in ("segments", "info", "seconds")]

FateKind = Literal["train", "evaluate"]


def settlement_rows(batch: Batch, settlement: Settlement) -> list[dict[str, Any]]:
    """Fate rows of one training step: the batch's members with score and staleness, and whatever was dropped since the last."""
    members = {(m.receipt.attempt, m.receipt.nonce): m for m in batch.members}
    rows = []
    for attempt, nonce, fate in settlement.fates:
        member = members.get((attempt, nonce))
        if member is not None:
            rows.append(_member_row(member, fate, batch.lineage, batch.step, batch.step - member.receipt.first_version))
        else:
            rows.append(
                {
                    **dict.fromkeys(FATE_SCHEMA.names),
                    **attempt_columns(attempt, nonce),
                    "fate": fate,
                    "lineage": batch.lineage,
                    "step": batch.step,
                }
            )
    return rows


def evaluation_rows(members: Sequence[Member], lineage: int, step: int) -> list[dict[str, Any]]:
    """Fate rows of an evaluation of version (lineage, step)."""
    return [_member_row(m, "evaluated", lineage, step, None) for m in members]


def write_fates(store: ObjectStore, kind: FateKind, lineage: int, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """One fate file; a second one for the same step replaces it."""
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows), FATE_SCHEMA), sink, compression="zstd")
    store.write(_fate_file(kind, lineage, step), sink.getvalue())


def abandon_after(store: ObjectStore, step: int) -> int:
    """Marks what training steps from version `step` on and later evaluations used as dropped because of the lineage: a resumed
    run goes on from version `step`. Returns how many rows were marked. RecordsDamaged if a file isn't a run's."""
    marked = 0
    for path in store.list(FATES):
        named = _FATE_NAME.fullmatch(path.rpartition("/")[2])
        if named is None:
            raise RecordsDamaged(f"{store.url}/{path} is not named as a run names its files; remove it from there")
        if int(named["step"]) >= step + (named["kind"] == "evaluate"):
            table = read_table(store, path)
            rows = [{**row, "fate": "lineage"} for row in table.to_pylist()]
            marked += sum(row["fate"] != "lineage" for row in table.to_pylist())
            sink = io.BytesIO()
            pq.write_table(pa.Table.from_pylist(rows, FATE_SCHEMA), sink, compression="zstd")
            store.write(path, sink.getvalue())
    return marked


def score_table(run_url: str, storage_options: Mapping[str, Any] | None = None) -> pd.DataFrame:
    """One row a trajectory with what became of it: purpose, task, episode, member, attempt, nonce, lineage, seed, outcome, first_version,
    last_version, tokens, sampled, turns, seconds_total, score, fate, version (the step it was trained from or evaluated at), staleness.

    A member that was dropped before it left a trajectory is not in it; `fate` is null for one that nothing decided about.
    """
    store = ObjectStore(run_url, storage_options)
    tables = [read_table(store, p, _PLAIN) for p in (*compacted_files(store), *store.list(FLUSHED))]
    if not tables:
        return pd.DataFrame(columns=[*_PLAIN, "score", "fate", "version", "staleness"])
    # A compaction that was stopped half-way leaves rows in both places.
    return _joined(pa.concat_tables(tables).to_pandas().drop_duplicates("nonce"), _fates(store))


def compact(run_url: str, storage_options: Mapping[str, Any] | None = None, undecided: Collection[str] = ()) -> int:
    """Joins flushed files and fates of an ended run into few large files, sorted by purpose, task and episode, and removes the flushed ones.

    Trajectories whose nonce is in `undecided`, which a resumed run may still train on, stay where their receipts say. Later ones go
    to further files. Returns the number of trajectories joined. Stopped half-way it loses nothing, and can be run again.
    """
    store = ObjectStore(run_url, storage_options)
    flushed = {p: read_table(store, p) for p in store.list(FLUSHED)}
    if not flushed:
        return 0
    parts = compacted_files(store)
    there = {nonce for p in parts for nonce in read_table(store, p, ["nonce"])["nonce"].to_pylist()}
    whole = pa.concat_tables(flushed.values(), promote_options="permissive")  # older files lack what was added later
    new = [i for i, nonce in enumerate(whole["nonce"].to_pylist()) if nonce not in there and nonce not in undecided]
    whole = whole.take(pa.array(new, pa.int64())).append_column("_row", pa.array(range(len(new)), pa.int64()))
    keys = _joined(whole.select([*_PLAIN, "_row"]).to_pandas(), _fates(store)).sort_values(["purpose", "task", "episode", "member", "attempt"])
    whole = whole.drop_columns(["_row"]).take(pa.array(keys["_row"], pa.int64()))
    for name, kind in (("score", pa.float64()), ("fate", pa.string()), ("version", pa.int32()), ("staleness", pa.int32())):
        values = [None if pd.isna(v) else v for v in keys[name]]
        whole = whole.append_column(name, pa.array(values, kind))
    for part, start in enumerate(range(0, whole.num_rows, ROWS_A_FILE), len(parts)):
        store.write(f"{COMPACTED}/part-{part:05d}.parquet", parquet_of(whole.slice(start, ROWS_A_FILE)))
    for path, table in flushed.items():
        if not any(nonce in undecided for nonce in table["nonce"].to_pylist()):
            store.delete(path)
    return whole.num_rows


def _joined(frame: pd.DataFrame, fates: pd.DataFrame) -> pd.DataFrame:
    """A trajectory that an abandoned lineage used and a later one used again has the later one's fate."""
    fates = fates.sort_values(["lineage", "step"], kind="stable")
    fates = fates.rename(columns={"step": "version"})[[*_KEY, "score", "fate", "version", "staleness"]]
    return frame.merge(fates.drop_duplicates(_KEY, keep="last"), on=_KEY, how="left")


def _fates(store: ObjectStore) -> pd.DataFrame:
    tables = [read_table(store, p) for p in store.list(FATES)]
    return (pa.concat_tables(tables) if tables else FATE_SCHEMA.empty_table()).to_pandas()


def _fate_file(kind: FateKind, lineage: int, step: int) -> str:
    return f"{FATES}/{kind}-{lineage}-{step:08d}.parquet"


def _member_row(m: Member, fate: str, lineage: int, step: int, staleness: int | None) -> dict[str, Any]:
    return {
        **attempt_columns(m.receipt.attempt, m.receipt.nonce), "fate": fate, "score": m.score.value, "parts": json.dumps(m.score.parts),
        "reason": m.score.reason, "lineage": lineage, "step": step, "staleness": staleness, "file": m.receipt.file, "row": m.receipt.row,
    }  # fmt: skip
