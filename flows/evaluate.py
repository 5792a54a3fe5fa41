"""Measures a run's newest version on held-out episodes."""

from __future__ import annotations

from rollart.session import Session


async def evaluate(session: Session) -> None:
    """Serves the version that the run was opened at and measures it once."""
    await session.publish({"flow": "evaluate"})
    await session.evaluate(session.config.evaluate.episodes)
