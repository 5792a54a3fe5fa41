"""The mix of tasks, and the supervised warm-up on scripted play of them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rollart.agents.parameters import OtherParameters
from rollart.config.section import Section
from rollart.control.affinity import Stage
from rollart.environments.protocol import RunIn
from rollart.rewards.registry import LIGHT
from rollart.training.settings import AdvantageOverride, OptimiserSettings
from rollart.types import SamplingTransform

ScoreIn = Literal["episode", "future"]


class Sampling(Section):
    """How responses are sampled for training."""

    temperature: float = Field(1.0, gt=0, le=10, description="softmax temperature; the trainer applies the same")
    top_k: int = Field(
        -1, ge=-1, description="cut to the k likeliest tokens (-1: none); what it keeps is stored with each token, and the trainer replays it"
    )
    top_p: float = Field(
        1.0, gt=0, le=1, description="cut to the likeliest tokens that come to this share of what top_k left (1: none); stored and replayed alike"
    )
    min_p: float = Field(0.0, ge=0, le=1, description="must stay 0: it is for evaluation (evaluate.min_p)")

    @model_validator(mode="after")
    def _replayable(self) -> Sampling:
        if self.min_p > 0:
            raise ValueError("min_p is for evaluation: leave it at 0 here, and set evaluate.min_p")
        return self

    @property
    def transform(self) -> SamplingTransform:
        return SamplingTransform(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)


class FilterSettings(Section):
    """Which groups are not worth a step. What is filtered out is counted by its reason, and another group is played in its place."""

    no_signal: Literal["skip", "replace"] = Field(
        "skip",
        description="a group whose members all scored the same takes its place in the batch untrained (skip), or gives it to another (replace), "
        "where the advantage estimator compares within groups",
    )
    long_share: float = Field(
        1.0, ge=0, le=1, description="largest share of a group that may run over max_tokens; a group over it is dropped as too_long (1: none is)"
    )


class AgentSettings(Section):
    """What an agent, an environment that runs its own loop over an OpenAI client, may do."""

    run_timeout: float = Field(240.0, gt=0, description="seconds after which its run, responses included, fails the attempt")
    parameters: OtherParameters = Field(
        "ignore",
        description="what becomes of parameters that would change what is sampled (temperature, seed, ...) and are not as the run has them: "
        "ignored, and counted in the trajectory's info, or refused with an error 400",
    )
    requests: int = Field(8, ge=1, le=1024, description="requests of an attempt that may be in flight at once; what is over gets an error 429")
    max_body: int = Field(1 << 20, ge=1024, description="bytes of a request; what is over gets an error 413")
    tool_format: str = Field("hermes", description="how the policy writes tool calls: hermes (<tool_call>{...}</tool_call>), or `module:Class`")


class TaskSettings(Section):
    """One task of the mix."""

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", description="name in metrics, tables and on the dashboard")
    environment: str = Field(description="a registered environment's name, or `module:Class`, which may be an agent's")
    settings: dict[str, Any] = Field(default_factory=dict, description="the environment's own settings")
    system: str = Field("", description="the system message that its episodes begin with; needs policy.chat")
    reward: str = Field("environment", description="a registered verifier's name, or `module:function`")
    score_in: ScoreIn | None = Field(
        None,
        description="where the verifier runs: in the trajectory's own task, on its environment's worker (episode), or as a future of its own, on "
        "the reward stage's class (future); default: episode for the verifiers that are quick by nature (environment, reasoning), else future",
    )
    weight: float = Field(1.0, gt=0, le=1e6, description="share of the groups of a batch, relative to the other tasks")
    group_size: int = Field(8, ge=2, description="trajectories a group (G)")
    min_members: int | None = Field(None, ge=2, description="survivors below which a group is dropped whole; default: group_size")
    max_turns: int = Field(1, ge=1, description="turns after which an episode is cut off; of an agent, the responses that it may ask for")
    max_new_tokens: int = Field(16, ge=1, description="tokens a response may have")
    max_tokens: int = Field(256, ge=8, description="tokens a trajectory may have, prompts included, in all of its segments")
    reset_timeout: float = Field(120.0, gt=0, description="seconds after which a reset fails the attempt (none for a plain function in the loop)")
    step_timeout: float = Field(60.0, gt=0, description="the same for a step")
    reward_timeout: float = Field(
        60.0, gt=0, description="seconds after which its verifier fails the attempt (none for those that are quick by nature, in an episode's task)"
    )
    run_in: RunIn = Field("thread", description="where the environment's calls run: in a thread, or in the worker's loop if none takes over 1 ms")
    agent: AgentSettings = Field(default_factory=lambda: AgentSettings())
    sampling: Sampling = Field(default_factory=lambda: Sampling())
    advantage: AdvantageOverride = Field(default_factory=lambda: AdvantageOverride())
    filters: FilterSettings = Field(default_factory=lambda: FilterSettings())
    classes: dict[Stage, str] = Field(
        default_factory=dict, description="hardware class by stage, where this task wants another one than `stages` says"
    )

    @model_validator(mode="after")
    def _members(self) -> TaskSettings:
        if self.min_members is not None and self.min_members > self.group_size:
            raise ValueError(f"min_members {self.min_members} is over group_size {self.group_size}: lower it")
        if self.max_new_tokens >= self.max_tokens:
            raise ValueError(f"max_new_tokens {self.max_new_tokens} leaves no room in max_tokens {self.max_tokens}: raise max_tokens")
        return self

    @property
    def scored_apart(self) -> bool:
        """Whether its scores are futures of their own."""
        return self.score_in == "future" or (self.score_in is None and self.reward not in LIGHT)


class WarmUpSettings(Section):
    """Supervised warm-up on imperfect scripted play, so that actions parse and reinforcement learning has something to improve."""

    steps: int = Field(0, ge=0, description="supervised steps; 0: no warm-up")
    batch: int = Field(64, ge=1, description="trajectories a supervised step")
    episodes: dict[str, int] = Field(default_factory=dict, description="scripted episodes by task name, to learn from")
    optimiser: OptimiserSettings = Field(
        default_factory=lambda: OptimiserSettings(lr=1e-3, decay="linear"),
        description="AdamW of the warm-up; total_steps defaults to warm_up.steps",
    )

    @model_validator(mode="after")
    def _something(self) -> WarmUpSettings:
        if any(n < 0 for n in self.episodes.values()):
            raise ValueError("warm_up.episodes counts episodes: give numbers from 0")
        if self.steps and not any(self.episodes.values()):
            raise ValueError("warm_up.steps needs scripted play: set warm_up.episodes.TASK for at least one task, or steps to 0")
        return self
