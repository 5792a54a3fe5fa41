"""Scores an answer with reasoning-gym's own scorer; owns how a trajectory's `info` maps to it, not which families are safe
to score in this process; the others are scored in a sandbox."""

from __future__ import annotations

import json

from rollart.environments.reasoning import SAFE_FAMILIES, dataset
from rollart.rewards.protocol import Verdict
from rollart.sandbox.scoring import score_in_sandbox
from rollart.types import Trajectory


def reasoning(trajectory: Trajectory) -> Verdict:
    """The library's score, in [0, 1], of `info["action"]` (the decoded last response), or of `info["answer"]` (the part of it that
    counts) if that is there, for `info["entry"]`.

    `info["family"]` and `info["config"]` name the dataset, as the environment `reasoning` leaves them. KeyError if one lacks;
    SandboxMissing for a family whose scorer is not known to leave the answer unevaluated where there is no sandbox, SandboxError if that breaks.
    """
    info = trajectory.info
    answer = str(info["answer"] if "answer" in info else info["action"]).strip()
    if info["family"] not in SAFE_FAMILIES:
        return score_in_sandbox(info["family"], info["config"], info["entry"], answer)
    score = float(dataset(info["family"], json.dumps(info["config"], sort_keys=True)).score_answer(answer, info["entry"]))
    return Verdict(score, reason="" if score >= 1.0 else f"answered {answer!r}, expected {info['entry']['answer']!r}")
