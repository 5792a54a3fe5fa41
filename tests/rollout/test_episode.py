"""The turn loop: ids are kept as sampled, versions and rewards stand where they belong, and failures are attributed."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from rollart.control.seeds import environment_seed, sampling_seed
from rollart.control.staleness import StalenessWindow
from rollart.environments import calls
from rollart.environments.calls import CallPool
from rollart.environments.protocol import RunIn, StepResult
from rollart.rollout.episode import EpisodeFailed, EpisodeRunner, Limits
from rollart.types import Attempt, Episode, GenerateRequest, GenerateResult, SamplingTransform, Version

EOS = 1


class Letters:
    """A tokenizer that merges: `ab` is one token, so that decoding and encoding again would change ids."""

    eos_ids = (EOS,)

    def __init__(self) -> None:
        self.prompts: list[tuple[tuple[str, ...], int | None, str]] = []

    def prompt(self, observations: Sequence[str], last: int | None = None, system: str = "") -> list[int]:
        self.prompts.append((tuple(observations), last, system))
        return ([2] if len(observations) == 1 else []) + self.encode(observations[-1])

    def encode(self, text: str) -> list[int]:
        ids, rest = [], text
        while rest:
            piece = "ab" if rest.startswith("ab") else rest[0]
            ids.append(100 if piece == "ab" else ord(piece) - ord("a") + 3)
            rest = rest[len(piece) :]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("ab" if i == 100 else chr(i - 3 + ord("a")) for i in ids if i > 2)


class Echo:
    """Tells the number of turns in letters; ends after `turns`."""

    def __init__(self, turns: int = 3) -> None:
        self.turns, self.seen, self.closed, self.seed, self.thread = turns, [], 0, None, None

    def reset(self, seed: int) -> str:
        self.seed, self.thread = seed, threading.get_ident()
        return "b"

    def step(self, action: str) -> StepResult:
        self.seen.append(action)
        n = len(self.seen)
        return StepResult("b", reward=float(n), terminated=n == self.turns, info={"n": n})

    def close(self) -> None:
        self.closed += 1


class Policy:
    """Answers `a` and the end token, at the versions given turn by turn."""

    def __init__(self, versions: Sequence[int]) -> None:
        self.versions, self.requests = list(versions), []

    async def __call__(self, request: GenerateRequest) -> GenerateResult:
        version = Version(0, self.versions[len(self.requests)])
        self.requests.append(request)
        return GenerateResult(request.rid, (3, EOS), (-0.5, -0.1), (version, version), "stop", len(request.input_ids), cached_tokens=1)


ATTEMPT = Attempt(Episode("echo", 7), member=2)


def runner(**changes: object) -> EpisodeRunner:
    settings = {"codec": Letters(), "limits": Limits(8, 4, 64), "transform": SamplingTransform(0.7), "run_seed": 5, "lineage": 0}
    return EpisodeRunner(**{**settings, **changes})  # type: ignore[arg-type]


async def test_a_trajectory_is_the_concatenation_of_what_was_sent_and_sampled() -> None:
    environment, policy = Echo(), Policy([4, 4, 5])
    trajectory = await runner().play(environment, ATTEMPT, policy)
    (segment,) = trajectory.segments
    assert segment.ids == [2, 4, 3, EOS, 4, 3, EOS, 4, 3, EOS]  # `a` then `b` never merge into 100, though as text they would
    assert segment.mask == [0, 0, 1, 1, 0, 1, 1, 0, 1, 1]
    assert segment.versions == [-1, -1, 4, 4, -1, 4, 4, -1, 5, 5]
    assert segment.logprobs == [0, 0, -0.5, -0.1, 0, -0.5, -0.1, 0, -0.5, -0.1]
    assert [r.input_ids for r in policy.requests] == [tuple(segment.ids[:n]) for n in (2, 5, 8)]
    assert [(t.start, t.end, t.reward) for t in segment.turns] == [(2, 4, 1.0), (5, 7, 2.0), (8, 10, 3.0)]
    assert trajectory.environment_reward == 6.0 and trajectory.version_span == (4, 5)
    assert trajectory.outcome == "terminated" and trajectory.info == {"n": 3, "action": "a", "actions": ["a", "a", "a"]}
    assert environment.seen == ["a"] * 3 and environment.closed == 1 and segment.transform.temperature == 0.7


async def test_each_prompt_is_made_from_all_observations_the_last_id_and_the_system_message() -> None:
    letters = Letters()
    await runner(codec=letters, system="be brief").play(Echo(), ATTEMPT, Policy([0] * 3))
    assert letters.prompts == [(("b",), None, "be brief"), (("b", "b"), EOS, "be brief"), (("b", "b", "b"), EOS, "be brief")]


async def test_seeds_follow_from_the_attempt_alone_and_a_retry_draws_the_same() -> None:
    first, again = Policy([0] * 3), Policy([0] * 3)
    environment = Echo()
    await runner().play(environment, ATTEMPT, first)
    await runner().play(Echo(), ATTEMPT.retried(), again)
    assert [r.seed for r in first.requests] == [sampling_seed(5, ATTEMPT, t) for t in range(3)] == [r.seed for r in again.requests]
    assert environment.seed == environment_seed(5, ATTEMPT.episode)


class Talker(Echo):
    """Answers at length."""

    def step(self, action: str) -> StepResult:
        return StepResult("cdefghijklmnop")


async def test_over_age_work_stops_at_the_next_turn() -> None:
    newest = iter([3, 4, 4])
    policy = Policy([3, 3, 3])
    trajectory = await runner(window=StalenessWindow(0), current_version=lambda: next(newest)).play(Echo(), ATTEMPT, policy)
    assert trajectory.outcome == "over_age" and len(policy.requests) == 2


class Waits:
    """A policy whose second answer never comes."""

    def __init__(self) -> None:
        self.asked, self.ended = asyncio.Event(), asyncio.Event()
        self.first = Policy([3])

    async def __call__(self, request: GenerateRequest) -> GenerateResult:
        if not self.first.requests:
            return await self.first(request)
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()
        raise AssertionError


async def test_a_newer_version_stops_over_age_work_in_the_middle_of_a_response() -> None:
    played, policy, environment = runner(window=StalenessWindow(1), current_version=lambda: 3), Waits(), Echo()
    playing = asyncio.create_task(played.play(environment, ATTEMPT, policy))
    await policy.asked.wait()
    assert not played.stop_for_age(4) and not playing.done()
    assert played.stop_for_age(5) and not played.stop_for_age(5)
    trajectory = await playing
    assert trajectory.outcome == "over_age" and policy.ended.is_set() and environment.closed == 1
    assert len(trajectory.turns) == 1 and trajectory.version_span == (3, 3)
    assert not playing.cancelled() and playing.cancelling() == 0


async def test_a_play_that_learns_of_a_newer_version_from_its_own_response_ends_at_its_next_turn() -> None:
    newest = [3]

    class Learns(Policy):
        async def __call__(self, request: GenerateRequest) -> GenerateResult:
            found = await super().__call__(request)
            if len(self.requests) == 2:
                newest[0] = 9
                assert not played.stop_for_age(9)
            return found

    for run_in in ("loop", "thread"):
        newest[0] = 3
        played, policy = runner(window=StalenessWindow(1), current_version=lambda: newest[0], run_in=run_in), Learns([3, 3, 3])
        playing = asyncio.create_task(played.play(Echo(), ATTEMPT, policy))
        trajectory = await playing
        await asyncio.sleep(0)
        assert trajectory.outcome == "over_age" and len(trajectory.turns) == 2 and playing.cancelling() == 0


async def test_what_has_sampled_nothing_or_has_ended_is_not_stopped_for_its_age() -> None:
    played = runner(window=StalenessWindow(0), current_version=lambda: 0)
    assert not played.stop_for_age(9)
    assert (await played.play(Echo(), ATTEMPT, Policy([0] * 3))).outcome == "terminated"
    assert not played.stop_for_age(9)


async def test_a_play_that_is_cancelled_closes_its_environment_and_is_no_trajectory() -> None:
    played, policy, environment = runner(window=StalenessWindow(1)), Waits(), Echo()
    playing = asyncio.create_task(played.play(environment, ATTEMPT, policy))
    await policy.asked.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert environment.closed == 1


class Hangs(Echo):
    """Its reset comes back when `free` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.free, self.called, self.gone = threading.Event(), threading.Event(), threading.Event()

    def reset(self, seed: int) -> str:
        self.called.set()
        self.free.wait(20)
        return "b"

    def close(self) -> None:
        super().close()
        self.gone.set()


async def test_a_reset_that_hangs_fails_the_attempt_and_is_closed_only_when_it_is_back() -> None:
    pool, environment = CallPool(threads=1), Hangs()
    with pytest.raises(EpisodeFailed, match=r"reset took longer than 0.05 s \(tasks.echo.reset_timeout\)"):
        await runner(limits=Limits(8, 4, 64, reset_s=0.05), pool=pool).play(environment, ATTEMPT, Policy([0]))
    assert pool.left == 1 and environment.closed == 0
    assert (await runner(pool=pool).play(Echo(), ATTEMPT, Policy([0] * 3))).outcome == "terminated"  # another thread took its place
    environment.free.set()
    assert await asyncio.to_thread(environment.gone.wait, 20)
    assert environment.closed == 1 and pool.left == 0


async def test_a_process_of_whose_calls_too_many_hang_is_told_of_as_unfit_and_keeps_the_next_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "STUCK_S", 0.01)
    unfit: asyncio.Queue[str] = asyncio.Queue()
    pool, environment = CallPool(threads=1, left_behind=1, unfit=unfit.put_nowait), Hangs()
    with pytest.raises(EpisodeFailed, match="took longer"):
        await runner(limits=Limits(8, 4, 64, reset_s=0.05), pool=pool).play(environment, ATTEMPT, Policy([0]))
    assert await asyncio.wait_for(unfit.get(), 20) == "1 calls have not come back, the last: reset"
    next_one = asyncio.create_task(runner(pool=pool).play(Echo(), ATTEMPT, Policy([0] * 3)))
    done, _ = await asyncio.wait((next_one,), timeout=0.1)
    assert not done and pool.waiting == 1
    environment.free.set()
    assert (await next_one).outcome == "terminated" and pool.waiting == 0


async def test_calls_that_come_back_in_time_leave_their_process_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "STUCK_S", 0.2)
    unfit: list[str] = []
    pool, environment = CallPool(threads=1, left_behind=1, unfit=unfit.append), Hangs()
    stopped = asyncio.create_task(runner(pool=pool).play(environment, ATTEMPT, Policy([0])))
    assert await asyncio.to_thread(environment.called.wait, 20)
    stopped.cancel()
    await asyncio.wait((stopped,))
    assert pool.left == 1
    environment.free.set()
    assert await asyncio.to_thread(environment.gone.wait, 20)
    await asyncio.sleep(0.3)  # past the moment at which it is looked at
    assert unfit == [] and pool.left == 0


async def test_a_step_that_takes_too_long_fails_wherever_it_runs() -> None:
    class Slow(Echo):
        async def step(self, action: str) -> StepResult:  # type: ignore[override]
            await asyncio.Event().wait()
            raise AssertionError

    with pytest.raises(EpisodeFailed, match=r"step took longer than 0.05 s \(tasks.echo.step_timeout\)") as failed:
        await runner(run_in="loop", limits=Limits(8, 4, 64, step_s=0.05)).play(Slow(), ATTEMPT, Policy([0]))
    assert failed.value.cause == "environment"


async def test_an_environment_s_own_time_out_is_told_as_its_own() -> None:
    class Times(Echo):
        def step(self, action: str) -> StepResult:
            raise TimeoutError("no answer from the shop")

    with pytest.raises(EpisodeFailed, match="environment raised in step: TimeoutError: no answer from the shop"):
        await runner().play(Times(), ATTEMPT, Policy([0]))


async def test_an_iterator_that_runs_out_in_an_environment_fails_the_attempt_at_once() -> None:
    class Empty(Echo):
        def reset(self, seed: int) -> str:
            return next(iter([]))

    pool, environment = CallPool(threads=1), Empty()
    with pytest.raises(EpisodeFailed, match="environment raised in reset: RuntimeError: StopIteration"):
        await runner(pool=pool).play(environment, ATTEMPT, Policy([0]))
    assert environment.closed == 1 and pool.left == 0


async def test_a_call_that_waits_for_a_free_thread_is_not_late() -> None:
    pool, first = CallPool(threads=1), Hangs()
    blocking = asyncio.create_task(runner(pool=pool).play(first, ATTEMPT, Policy([0] * 3)))
    assert await asyncio.to_thread(first.called.wait, 20)
    waiting = asyncio.create_task(runner(limits=Limits(8, 4, 64, reset_s=0.2, step_s=0.2), pool=pool).play(Echo(), ATTEMPT, Policy([0] * 3)))
    done, _ = await asyncio.wait((waiting,), timeout=0.5)
    assert not done
    first.free.set()
    assert (await waiting).outcome == "terminated" and (await blocking).outcome == "terminated"


async def test_a_close_that_raises_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Sticks(Echo):
        def close(self) -> None:
            raise OSError("device busy")

    assert (await runner().play(Sticks(), ATTEMPT, Policy([0] * 3))).outcome == "terminated"
    assert "an environment (Sticks) was not closed: OSError: device busy" in caplog.text


async def test_limits_end_an_episode_and_bound_each_response() -> None:
    policy = Policy([0] * 9)
    turns = await runner(limits=Limits(2, 4, 64)).play(Echo(9), ATTEMPT, policy)
    assert turns.outcome == "truncated" and len(turns.turns) == 2
    policy = Policy([0] * 9)
    tokens = await runner(limits=Limits(9, 4, 8)).play(Echo(9), ATTEMPT, policy)
    assert tokens.outcome == "over_length"
    assert [r.max_new_tokens for r in policy.requests] == [4, 3]  # 2 of 8 are the prompt's, then 5 are used
    assert len(tokens.segments[0]) == 7  # one more observation would leave no room


async def test_no_trajectory_outgrows_its_limit_by_an_observation_that_nothing_answers() -> None:
    played = await runner(limits=Limits(9, 2, 8)).play(Talker(), ATTEMPT, Policy([0] * 9))
    assert played.outcome == "over_length" and len(played.turns) == 1 and len(played.segments[0]) <= 8


async def test_a_first_prompt_that_leaves_no_room_fails_and_names_the_field() -> None:
    policy = Policy([0])
    with pytest.raises(EpisodeFailed, match=rf"tasks.{ATTEMPT.episode.task}.max_tokens: the first prompt has \d+ tokens .* in 2; raise it"):
        await runner(limits=Limits(9, 1, 2)).play(Echo(9), ATTEMPT, policy)
    assert policy.requests == []


async def test_what_the_environment_raises_is_its_failure_and_it_is_closed() -> None:
    class Broken(Echo):
        def step(self, action: str) -> StepResult:
            raise KeyError("inventory")

    environment = Broken()
    with pytest.raises(EpisodeFailed, match="environment raised in step: KeyError"):
        await runner().play(environment, ATTEMPT, Policy([0]))
    assert environment.closed == 1


async def test_an_environment_that_exits_fails_its_attempt_and_not_the_worker() -> None:
    class Leaves(Echo):
        def step(self, action: str) -> StepResult:
            raise SystemExit(3)

    for run_in in ("loop", "thread"):
        with pytest.raises(EpisodeFailed, match=r"environment raised in step: .*SystemExit: 3"):
            await runner(run_in=run_in).play(Leaves(), ATTEMPT, Policy([0]))


class Panic(BaseException):
    """As Rust packages raise it: no Exception."""


@pytest.mark.parametrize("raised", [Panic, KeyboardInterrupt, asyncio.CancelledError])
async def test_what_is_no_exception_fails_the_attempt_and_not_the_worker_wherever_it_is_raised(raised: type[BaseException]) -> None:
    class Panics(Echo):
        def step(self, action: str) -> StepResult:
            raise raised("boom")

    class PanicsLater(Echo):
        async def step(self, action: str) -> StepResult:  # type: ignore[override]
            await asyncio.sleep(0)
            raise raised("boom")

    environments: list[tuple[RunIn, Echo]] = [("loop", Panics()), ("thread", Panics()), ("loop", PanicsLater())]
    for run_in, environment in environments:
        with pytest.raises(EpisodeFailed, match=f"environment raised in step: .*{raised.__name__}: boom"):
            await runner(run_in=run_in).play(environment, ATTEMPT, Policy([0]))
        assert environment.closed == 1


async def test_a_close_that_panics_costs_nothing() -> None:
    class Panics(Echo):
        def close(self) -> None:
            raise Panic("boom")

    assert (await runner().play(Panics(), ATTEMPT, Policy([0] * 3))).outcome == "terminated"


async def test_a_coroutine_step_that_is_cancelled_from_outside_is_cancelled_and_no_failure() -> None:
    began = asyncio.Event()

    class Waits(Echo):
        async def step(self, action: str) -> StepResult:  # type: ignore[override]
            began.set()
            await asyncio.Event().wait()
            raise AssertionError

    playing = asyncio.create_task(runner(run_in="loop").play(Waits(), ATTEMPT, Policy([0])))
    await began.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, "returned NoneType from step, where a StepResult is needed"),
        (StepResult("b", reward=float("nan")), "reward nan .* a finite number"),
        (StepResult("b", reward="much"), "no number or no JSON: could not convert"),
        (StepResult("b", info={"seen": {1, 2}}), "no JSON: Object of type set"),
        (StepResult("b", info=None), "info null from step; .* a JSON object"),
        (StepResult(5), "returned int from step, where an observation"),
        (StepResult("\ud800"), "an observation from step that is no text"),
    ],
)
async def test_what_step_returns_is_refused_unless_it_can_be_stored(returned: object, says: str) -> None:
    class Returns(Echo):
        def step(self, action: str) -> StepResult:
            return returned  # type: ignore[return-value]

    with pytest.raises(EpisodeFailed, match=says):
        await runner().play(Returns(), ATTEMPT, Policy([0]))


async def test_a_first_observation_that_is_no_text_is_refused() -> None:
    class Numbers(Echo):
        def reset(self, seed: int) -> str:
            return seed  # type: ignore[return-value]

    with pytest.raises(EpisodeFailed, match="returned int from reset, where an observation"):
        await runner().play(Numbers(), ATTEMPT, Policy([0]))


async def test_an_aborted_response_fails_the_attempt() -> None:
    async def aborted(request: GenerateRequest) -> GenerateResult:
        return GenerateResult(request.rid, (), (), (), "abort", 2)

    with pytest.raises(EpisodeFailed, match="aborted turn 0"):
        await runner().play(Echo(), ATTEMPT, aborted)


async def test_environments_run_where_the_task_says_and_may_be_coroutines() -> None:
    here = threading.get_ident()
    in_loop, in_thread = Echo(), Echo()
    await runner(run_in="loop").play(in_loop, ATTEMPT, Policy([0] * 3))
    await runner(run_in="thread").play(in_thread, ATTEMPT, Policy([0] * 3))
    assert in_loop.thread == here and in_thread.thread != here

    class Async(Echo):
        async def reset(self, seed: int) -> str:
            await asyncio.sleep(0)
            return "b"

        async def close(self) -> None:
            self.closed += 1

    environment = Async()
    assert (await runner().play(environment, ATTEMPT, Policy([0] * 3))).outcome == "terminated" and environment.closed == 1


async def test_scripted_play_stands_as_sampled_tokens_and_repeats() -> None:
    class Scripted(Echo):
        def script(self, rng: object) -> str:
            return "ab" if rng.random() < 0.5 else "c"  # type: ignore[attr-defined]

    one = await runner().play_script(Scripted(5), ATTEMPT)
    two = await runner().play_script(Scripted(5), ATTEMPT)
    assert one.segments[0].ids == two.segments[0].ids
    assert {i for i, m in zip(one.segments[0].ids, one.segments[0].mask, strict=True) if m} <= {100, 5, EOS}
    assert all(t.finish_reason == "stop" for t in one.turns)
    with pytest.raises(EpisodeFailed, match=r"has no script\(\)"):
        await runner().play_script(Echo(), ATTEMPT)
