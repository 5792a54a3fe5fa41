"""How trajectories run, and how versions are evaluated with them."""

from __future__ import annotations

from pydantic import Field

from rollart.config.section import Section
from rollart.control.redundancy import RedundancyRule
from rollart.types import SamplingTransform


class RedundancySettings(Section):
    """Second tries at members that are late, on slots that are free."""

    rule: RedundancyRule = Field(
        "none",
        description="before_first_token: a member that is late to ask for its first token gets a second one, and who begins first goes on; "
        "first_finished: groups are launched larger and whoever is last is stopped, which favours short responses",
    )
    factor: float = Field(1.3, ge=1, le=4, description="tries that may be out for a group, over its size")
    patience: float = Field(0.9, ge=0, lt=1, description="share of a task's measured delays that a try has to outlast before it gets a second one")


class RolloutSettings(Section):
    """How trajectories run."""

    attempts: int = Field(
        3, ge=1, description="tries at a member before it is given up, counting those that its environment, its verifier or its silence ended"
    )
    machine_attempts: int = Field(10, ge=1, description="the same, counting those that an engine, a worker or a store ended, which take many at once")
    rest: float = Field(0.5, ge=0, description="seconds before a member is tried again after its first failure, twice as long after each further one")
    most_rest: float = Field(60.0, ge=0, description="seconds that it rests at most")
    lease: float = Field(
        300.0,
        gt=0,
        description="seconds after which an attempt that went to the cluster counts as failed if no worker is at it, or one is still at the "
        "same call or request as then",
    )
    silence: float = Field(60.0, gt=0, description="seconds in which nothing ends after which it is told where everything in flight is")
    worker_wait: float = Field(
        180.0, gt=0, description="seconds that work may wait for a worker with its resource while the cluster has none, after which the run fails"
    )
    redundancy: RedundancySettings = Field(default_factory=lambda: RedundancySettings())
    agent_host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="address at which each environment worker serves agents' URLs, on a free port; 0.0.0.0 for agents that run elsewhere "
        "(in containers), who reach them at the worker's own address",
    )
    flush: float = Field(
        0.25,
        gt=0,
        description="seconds that a finished trajectory waits for others before it is written; longer where workers are so many, or "
        "steps so long, that a step would cost the store over some eighty files",
    )
    flush_rows: int = Field(64, ge=1, description="finished trajectories that are written at once at the latest; more in large batches")


class EvaluateSettings(Section):
    """Evaluation on held-out seeds, each on one version held to its end."""

    episodes: int = Field(256, ge=1, description="held-out episodes a task, the same ones every time")
    every: int = Field(50, ge=0, description="steps between evaluations; 0: only before and after")
    every_episodes: int = Field(64, ge=1, description="episodes a task of those in between")
    temperature: float = Field(1.0, ge=0, le=10, description="sampling temperature; 0 is greedy")
    top_k: int = Field(-1, ge=-1, description="cut to the k likeliest tokens (-1: none)")
    top_p: float = Field(1.0, gt=0, le=1, description="cut to the likeliest tokens that come to this share of what top_k left (1: none)")
    min_p: float = Field(0.0, ge=0, le=1, description="cut to tokens at least this share as likely as the likeliest, of what top_p left (0: none)")

    @property
    def transform(self) -> SamplingTransform:
        return SamplingTransform(self.temperature, self.top_p, self.top_k, self.min_p)
