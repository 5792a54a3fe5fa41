"""All trajectories that a run has stored, newest first, for those that learn from what was sampled; owns what counts as sampled there."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from rollart.rollout.records import FLUSHED, RecordsDamaged, compacted_files, decode
from rollart.types import SegmentError, Trajectory
from storage.objects.store import ObjectStore

__all__ = ["sampled_trajectories"]


def sampled_trajectories(store: ObjectStore, most: int) -> list[Trajectory]:
    """At most `most` trajectories of the run in `store`, in canonical order, each attempt once: those that a policy sampled, so none that was
    scripted, and none with greedy segments or min-p. Newer files come first. RecordsDamaged for a file that is none."""
    found: dict[str, Trajectory] = {}
    for trajectory in _stored(store):
        if len(found) == most:
            break
        if trajectory.attempt.episode.purpose != "warm_up" and all(
            s.transform.temperature > 0 and s.transform.min_p == 0 for s in trajectory.segments
        ):
            found.setdefault(str(trajectory.attempt), trajectory)
    return sorted(found.values(), key=lambda t: t.attempt)


def _stored(store: ObjectStore) -> Iterator[Trajectory]:
    for path in (*sorted(store.list(FLUSHED), reverse=True), *sorted(compacted_files(store), reverse=True)):
        data = store.read(path)
        try:
            trajectories = decode(data)
        except (pa.ArrowException, OSError, SegmentError) as error:
            raise RecordsDamaged(f"{store.url}/{path} is no whole Parquet file of trajectories ({error}); remove it from there") from error
        yield from trajectories
