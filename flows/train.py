"""Multi-task GRPO on trajectories that advance on their own while the policy trains: the main flow."""

from __future__ import annotations

import time

from flows.sft import supervise
from rollart.session import Interrupted, Session


async def train(session: Session) -> None:
    """Warms the policy up, measures it, then trains it for `train.steps` steps; measured again along the way and at the end.

    A batch is what the ledger can form inside the staleness window; while the trainer works on it, trajectories for the next ones
    go on, and engines swap to each new version between two decode steps.
    """
    config = session.config
    if not session.resumed:
        await supervise(session)
    await session.publish({"flow": "train"})
    if not session.resumed:
        await session.evaluate(config.evaluate.episodes)
        await session.checkpoint()
    session.telemetry.phase("training")
    try:
        async with session.rollout() as rollout:
            while session.version.step < config.train.steps:
                waiting = time.perf_counter()
                batch = await session.unless_stopped(rollout.next_batch())
                await session.train_on(batch, wait_s=time.perf_counter() - waiting)
                await session.publish({"flow": "train", "trained_on": [str(g.episode) for g in batch.groups]})
                if config.training.draft.online and session.due(config.training.draft.publish_every, session.version.step):
                    await session.drafts.publish(session.version.lineage)
                if session.due(config.train.checkpoint_every, session.version.step):
                    await session.checkpoint()
                if session.due(config.evaluate.every, session.version.step) and session.version.step < config.train.steps:
                    await session.evaluate(config.evaluate.every_episodes)
                    session.telemetry.phase("training")
    except Interrupted:
        session.telemetry.phase("stopping")
        await session.checkpoint()
        raise
    await session.checkpoint()
    await session.evaluate(config.evaluate.episodes)
