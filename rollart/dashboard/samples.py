"""A few trajectories of a run as text, for its report."""

from __future__ import annotations

import io
from typing import Literal

import pandas as pd
import pyarrow.parquet as pq

from rollart.dashboard.report import Sample
from rollart.rollout.records import COMPACTED, FLUSHED, from_row
from rollart.rollout.vocabulary import Vocabulary
from rollart.run import RunFolder
from rollart.types import Trajectory
from storage.models.folders import local_folder

A_TASK = 3
"""Trajectories shown of each task: the last ones of the training, where there are."""


def sample_trajectories(folder: RunFolder, table: pd.DataFrame) -> list[Sample]:
    """The last few training trajectories of each task in the run's score `table`, decoded; none while the run has none."""
    wanted = table[(table.purpose == "train") & table.score.notna()].sort_values(["last_version", "episode"]).groupby("task").tail(A_TASK)
    keys = {(r.task, r.episode, r.member, r.nonce): r for r in wanted.itertuples()}
    if not keys:
        return []
    nonces = [nonce for *_, nonce in keys]
    vocabulary = Vocabulary(local_folder(folder.child("policy"), folder.storage_options))
    samples = []
    for path in folder.store.list(COMPACTED):
        if not path.endswith(".parquet") or not (path.startswith(FLUSHED) or path.count("/") == 1):
            continue
        found = pq.read_table(io.BytesIO(folder.store.read(path)), filters=[("nonce", "in", nonces)])
        for row in found.to_pylist():
            key = (row["task"], row["episode"], row["member"], row["nonce"])
            if key in keys:  # popped, since a row may stand in a compacted file and in the flushed one that it came from
                samples.append(_sample(from_row(row), keys.pop(key), vocabulary))
    return sorted(samples, key=lambda s: s.name)


def _sample(trajectory: Trajectory, row: pd.Series, vocabulary: Vocabulary) -> Sample:
    pieces: list[tuple[Literal["prompt", "response"], str]] = []
    for segment in trajectory.segments:
        at = 0
        for turn in segment.turns:
            pieces.append(("prompt", vocabulary.decode(segment.ids[at : turn.start])))
            pieces.append(("response", vocabulary.decode(segment.ids[turn.start : turn.end])))
            at = turn.end
    return Sample(
        str(trajectory.attempt), trajectory.attempt.episode.task, trajectory.version_span[0], float(row.score), trajectory.outcome,
        tuple(pieces), str(row.fate),
    )  # fmt: skip
