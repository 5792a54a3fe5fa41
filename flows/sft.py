"""Supervised fine-tuning on scripted play: the warm-up of a policy that does not know the tasks' format yet."""

from __future__ import annotations

import random

from rollart.control.seeds import derive
from rollart.session import Session


async def supervise(session: Session) -> None:
    """Takes `warm_up.steps` supervised steps on imperfect scripted episodes, then starts a fresh optimiser."""
    warm_up = session.config.warm_up
    if not warm_up.steps:
        return
    session.telemetry.phase("warming up")
    with session.telemetry.stage("warm_up"):
        receipts = await session.unless_stopped(session.scripted(warm_up.episodes))
        await session.trainer.begin(warm_up.optimiser.over(warm_up.steps))
        rng = random.Random(derive(session.config.run.seed, "warm_up"))
        for step in range(warm_up.steps):
            metrics = await session.unless_stopped(session.trainer.supervised(rng.sample(receipts, min(warm_up.batch, len(receipts)))))
            if step % max(1, warm_up.steps // 10) == 0:
                session.telemetry.note(f"warm-up step {step}/{warm_up.steps}: cross entropy {metrics.loss:.3f} nats a token")
        await session.trainer.begin()


async def sft(session: Session) -> None:
    """The warm-up alone, published as version 0."""
    await supervise(session)
    await session.publish({"flow": "sft"})
    await session.evaluate(session.config.evaluate.episodes)
    await session.checkpoint()
