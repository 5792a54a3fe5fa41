"""Evaluation alone: how good a policy is at the configured tasks, whoever trained it."""

from __future__ import annotations

from rollart.session import Session


async def evaluate(session: Session) -> None:
    """Serves `policy.model` as version 0 and measures it on the held-out episodes of each task; nothing is trained."""
    await session.publish({"flow": "evaluate"})
    await session.evaluate(session.config.evaluate.episodes)
