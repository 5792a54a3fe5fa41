"""Trajectories as Parquet: the schema, what is written by environment workers, and how others read it back.

Files under `trajectories/` of a run: `flushed/` holds what environment workers wrote as episodes ended, `fates/` what became of
each member and its score (one file a step or evaluation). A compaction joins the two into `trajectories/*.parquet`.
"""

from __future__ import annotations

import io
import json
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollart.types import Attempt, Episode, KeptSets, SamplingTransform, Segment, Trajectory, Turn
from storage.errors import StoreError
from storage.objects.store import ObjectStore

FLUSHED = "trajectories/flushed"
FATES = "trajectories/fates"
COMPACTED = "trajectories"

_TURN = pa.struct(
    [("start", pa.int32()), ("end", pa.int32()), ("finish_reason", pa.string()), ("cached_tokens", pa.int32()), ("reward", pa.float64())]
)
_SEGMENT = pa.struct(
    [
        ("temperature", pa.float64()), ("top_p", pa.float64()), ("top_k", pa.int32()), ("min_p", pa.float64()), ("kv", pa.string()),
        ("ids", pa.list_(pa.int32())), ("mask", pa.list_(pa.int8())), ("logprobs", pa.list_(pa.float64())), ("versions", pa.list_(pa.int32())),
        ("turns", pa.list_(_TURN)), ("kept", pa.list_(pa.int32())), ("kept_counts", pa.list_(pa.int32())),
    ]
)  # fmt: skip
_ATTEMPT = [
    ("purpose", pa.string()), ("task", pa.string()), ("episode", pa.int64()), ("member", pa.int32()),
    ("attempt", pa.int32()), ("nonce", pa.string()),
]  # fmt: skip
SCHEMA = pa.schema(
    [
        *_ATTEMPT, ("lineage", pa.int32()), ("seed", pa.int64()), ("outcome", pa.string()), ("first_version", pa.int32()),
        ("last_version", pa.int32()), ("tokens", pa.int32()), ("sampled", pa.int32()), ("turns", pa.int32()), ("seconds_total", pa.float64()),
        ("seconds", pa.string()), ("info", pa.string()), ("segments", pa.list_(_SEGMENT)),
    ]
)  # fmt: skip
"""One row a trajectory; `seconds` and `info` are JSON objects. A segment's `kept` are the ids that top-k and top-p kept, ascending at each sampled
token, and `kept_counts` how many of them are each one's; both empty where nothing was cut."""

_KEPT = "segments.list.element.kept.list.element"

FATE_SCHEMA = pa.schema(
    [
        *_ATTEMPT, ("fate", pa.string()), ("score", pa.float64()), ("parts", pa.string()), ("reason", pa.string()), ("lineage", pa.int32()),
        ("step", pa.int32()), ("staleness", pa.int32()), ("file", pa.string()), ("row", pa.int32()),
    ]
)  # fmt: skip
"""One row a member: its fate, its score if it has one, the lineage and version (step) that the training step started from or that was
evaluated, its staleness there, and where its trajectory stands."""


class RecordsDamaged(StoreError):
    """A file of trajectories or fates is cut short, changed, or none of the run's."""


class RecordMissing(RuntimeError):
    """A receipt names a trajectory that its file does not hold."""


def flushed_name(writer: str, number: int, at: float) -> str:
    """The path of the file that `writer` flushes as its `number`-th at `at` (unix seconds): by path, files are in the order of time."""
    return f"{FLUSHED}/{int(at * 1000):014d}-{writer}-{number:06d}.parquet"


def flushed_at(path: str) -> float:
    """When a flushed file was written, in unix seconds by its writer's clock. RecordsDamaged if it isn't named like one."""
    time, _, rest = path.rpartition("/")[2].partition("-")
    if not (rest and time.isdecimal()):
        raise RecordsDamaged(f"{path} is not named as a run names its files; remove it from there")
    return int(time) / 1000


def compacted_files(store: ObjectStore) -> list[str]:
    """The paths of the files into which a run's trajectories were joined, in their order."""
    return [p for p in store.list(COMPACTED) if p.count("/") == 1 and p.endswith(".parquet")]


def attempt_columns(attempt: Attempt, nonce: str) -> dict[str, Any]:
    e = attempt.episode
    return {"purpose": e.purpose, "task": e.task, "episode": e.index, "member": attempt.member, "attempt": attempt.number, "nonce": nonce}


def read_table(store: ObjectStore, path: str, columns: Sequence[str] | None = None) -> pa.Table:
    """The Parquet file at `path` of a run; RecordsDamaged if it is none."""
    data = store.read(path)
    try:
        return pq.read_table(io.BytesIO(data), columns=None if columns is None else list(columns))
    except (pa.ArrowException, OSError) as error:
        raise RecordsDamaged(f"{store.url}/{path} is no whole Parquet file ({error}); remove it to go on without what it held") from error


def encode(trajectories: Sequence[Trajectory]) -> bytes:
    """A Parquet file of these trajectories, in this order."""
    return parquet_of(pa.Table.from_pylist([_to_row(t) for t in trajectories], SCHEMA))


def parquet_of(table: pa.Table) -> bytes:
    """A Parquet file of rows of SCHEMA, perhaps with further columns.

    Kept ids are written as differences: at top-k 20 some 38 bytes a sampled token, where a dictionary takes 69, and for a top-p that keeps most
    of a vocabulary of 49,152 not over 5.5 kilobytes, about a bit an id.
    """
    others = [leaf for field in table.schema for leaf in _leaves(field.name, field.type) if leaf != _KEPT]
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", use_dictionary=others, column_encoding={_KEPT: "DELTA_BINARY_PACKED"})
    return sink.getvalue()


def _leaves(name: str, kind: pa.DataType) -> list[str]:
    """The columns that Parquet makes of a field, as it spells them."""
    if pa.types.is_list(kind):
        return _leaves(f"{name}.list.element", kind.value_type)
    if pa.types.is_struct(kind):
        return [leaf for field in kind for leaf in _leaves(f"{name}.{field.name}", field.type)]
    return [name]


def decode(data: bytes) -> list[Trajectory]:
    """The trajectories of a Parquet file; SegmentError if one of them breaks an invariant, pyarrow's own error if it is no such file."""
    return [from_row(row) for row in pq.read_table(io.BytesIO(data)).to_pylist()]


def _to_row(t: Trajectory) -> dict[str, Any]:
    first, last = t.version_span
    return {
        **attempt_columns(t.attempt, t.nonce), "lineage": t.lineage, "seed": t.seed, "outcome": t.outcome, "first_version": first,
        "last_version": last, "tokens": sum(map(len, t.segments)), "sampled": t.sampled, "turns": len(t.turns),
        "seconds_total": t.seconds.get("total", 0.0), "seconds": json.dumps(t.seconds), "info": json.dumps(t.info),
        "segments": [_segment_row(s) for s in t.segments],
    }  # fmt: skip


def _segment_row(s: Segment) -> dict[str, Any]:
    turns = [
        {"start": t.start, "end": t.end, "finish_reason": t.finish_reason, "cached_tokens": t.cached_tokens, "reward": t.reward} for t in s.turns
    ]
    f = s.transform
    return {
        "temperature": f.temperature, "top_p": f.top_p, "top_k": f.top_k, "min_p": f.min_p, "kv": s.kv,
        "ids": s.ids, "mask": s.mask, "logprobs": s.logprobs, "versions": s.versions, "turns": turns,
        "kept": np.array(s.kept.ids), "kept_counts": np.array(s.kept.counts),
    }  # fmt: skip


def _kept(row: dict[str, Any]) -> KeptSets:
    """Empty also in files that were written before there were any."""
    return KeptSets(array("i", row.get("kept") or ()), array("i", row.get("kept_counts") or ()))


def from_row(row: dict[str, Any]) -> Trajectory:
    """The trajectory of one Parquet row."""
    attempt = Attempt(Episode(row["task"], row["episode"], row["purpose"]), row["member"], row["attempt"])
    segments = [
        Segment(
            SamplingTransform(s["temperature"], s["top_p"], s["top_k"], s["min_p"]), s["kv"], s["ids"], s["mask"], s["logprobs"], s["versions"],
            [Turn(**t) for t in s["turns"]], _kept(s),
        )
        for s in row["segments"]
    ]  # fmt: skip
    return Trajectory(
        attempt, row["nonce"], row["lineage"], row["seed"], segments, row["outcome"], json.loads(row["info"]), json.loads(row["seconds"])
    )
