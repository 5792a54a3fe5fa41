"""Random parts of a run are killed at random instants, the whole run among them, which the same command then resumes: nothing is lost or used twice.

The runs share a cluster of Dask's own commands, so that each starts in seconds; what one leaves on it the next would stumble over.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.dask_cluster import DaskCluster

STEPS, ALPHA, BATCH = 5, 1, 4 * 4 + 2 * 3
GROUP = {"guess_number": 4, "chain_sum": 3}
MOST_STARTS = 8
"""A run is killed five times at most, and a start more may find a worker that is not back yet."""

PATIENCE_S = 200.0

ENDS_THE_RUN = {"trainer", "coordinator"}
"""Parts whose loss ends the run, which can be resumed then; it outlives the loss of any other."""

PARTS = ("player-0", "player-1", "judge", "engine", "generator", "trainer", "coordinator")

SETTINGS = (
    f"train.steps={STEPS}", f"train.alpha={ALPHA}", "warm_up.steps=0", "evaluate.episodes=2", "evaluate.every=0", "rollout.rest=0.05",
    "weights.keep_last=0", "tasks.guess_number.environment=tests.faults.misbehaving:Slow", "tasks.guess_number.run_in=thread",
    "tasks.guess_number.reward=tests.faults.misbehaving:slow_verdict", "tasks.guess_number.score_in=future", "tasks.guess_number.max_turns=6",
    "tasks.guess_number.settings.turns=6", "hardware.player.slots=24", "hardware.player.workers=2",
)  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(600)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        first, count = metafunc.config.getoption("--first-seed"), metafunc.config.getoption("--seeds")
        metafunc.parametrize("seed", range(first, first + count))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaskCluster]:
    made = DaskCluster(tmp_path_factory.mktemp("cluster"))
    made.worker("TRAIN=1", name="trainer")
    made.worker("GENERATE=1", name="generator")
    made.worker("REWARD=4", name="judge")
    for name in ("player-0", "player-1"):
        made.worker("ENVIRONMENT=24", name=name)
    made.wait_for(len(made.workers))
    yield made
    made.end()


class Story:
    """What happened when, for whoever reads a failure."""

    def __init__(self, seed: int) -> None:
        self._began, self._told = time.monotonic(), [f"seed {seed}"]

    def tell(self, what: str) -> None:
        self._told.append(f"{time.monotonic() - self._began:.1f} s: {what}")

    def __repr__(self) -> str:
        return "; ".join(self._told)


def test_whatever_dies_and_whenever_the_run_ends_whole(place: Any, cluster: DaskCluster, seed: int) -> None:
    rng, name = random.Random(seed), f"seed-{seed}"
    kills = [(rng.uniform(0.2, 2.5), rng.choice(PARTS)) for _ in range(rng.randint(3, 5))]
    settings = (*SETTINGS, f"run.scheduler={cluster.address}", f"run.seed={seed}", f"train.checkpoint_every={rng.randint(1, 3)}")
    early = rng.random() < 0.3
    story = Story(seed)
    for _ in range(MOST_STARTS):
        cluster.wait_for(len(cluster.workers))
        running = place.start(name, *settings, resume=(place.run(name) / "config.yaml").exists())
        struck = storm(kills, early, cluster, running, story)
        code = ended(running, story)
        story.tell(f"ended with {code}: {running.heard.splitlines()[-1:]}")
        assert running.left() == [], story
        if code == 0:
            break
        assert code in (3, -9) and struck & ENDS_THE_RUN, (story, running.heard)
    else:
        pytest.fail(f"never ended well: {story}")
    assert_whole(place, name, story)
    assert [c for c in cluster.processes() if "rollart" in c] == [], story
    assert not running.shared_memory.exists(), story
    print(story)


def storm(kills: list[tuple[float, str]], early: bool, cluster: DaskCluster, running: Any, story: Story) -> set[str]:
    """Takes kills from the list while the run goes on; which parts were struck."""
    struck: set[str] = set()
    running.hears("evaluating step" if early else "training step")
    story.tell("strikes from here on")
    while kills and running.process.poll() is None:
        delay, part = kills.pop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.process.wait(delay)
            break
        process = {"coordinator": lambda: psutil.Process(running.process.pid), "engine": lambda: cluster.engine("generator")}.get(
            part, lambda part=part: cluster.process(part)
        )()
        story.tell(f"{part} killed" if process else f"no {part} to kill")
        if process is not None:
            struck.add(part)
            process.kill()
    return struck


def ended(running: Any, story: Story) -> int:
    try:
        running.process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        running.kill_all()
        pytest.fail(f"did not end within {PATIENCE_S:.0f} s: {story}\n{running.heard}")
    return int(running.wait())


def assert_whole(place: Any, name: str, story: Story) -> None:
    """What the stored ledger, fates, trajectories, versions and last checkpoint say of a run agrees, and breaks no rule."""
    batches, table = place.journal(name).batches(), place.trajectories(name)
    assert [entry.step for entry in batches] == list(range(STEPS)), story
    used = {
        nonce: (entry.step, attempt.rpartition("/")[0])
        for entry in batches
        for attempt, nonce, fate in entry.fates
        if fate in ("trained", "no_signal")
    }
    assert Counter(step for step, _ in used.values()) == dict.fromkeys(range(STEPS), BATCH), story
    assert max(Counter(member for _, member in used.values()).values()) == 1, story
    stored = table[table["nonce"].isin(used)].drop_duplicates("nonce")
    assert len(stored) == len(used), story
    for row in stored.itertuples():
        assert 0 <= used[row.nonce][0] - row.first_version <= ALPHA, (row, story)
    trained = table[table["fate"].isin(["trained", "no_signal"])]
    assert set(trained["nonce"]) == set(used) and not trained.duplicated(["task", "episode", "member"]).any(), story
    assert {v.step for v in place.weights(name).versions()} == set(range(STEPS + 1)), story
    assert_accounted(place, name, batches, story)


def assert_accounted(place: Any, name: str, batches: list[Any], story: Story) -> None:
    """Each planned member has exactly one fate or is open still."""
    from rollart.session import CUT

    last = place.checkpoints(name).load()
    cut = CUT.validate_python(last.documents["ledger"])
    assert cut.next_step == STEPS, story
    found = Counter(attempt.rpartition("/")[0] for entry in batches for attempt, _, _ in entry.fates)
    found.update(str(attempt).rpartition("/")[0] for attempt, _, _ in cut.unsettled)
    found.update(f"train/{g.episode.task}/{g.episode.index}/{m.index}" for g in cut.open for m in g.members if m.state != "dropped")
    planned = [f"train/{task}/{i}/{m}" for task, count in cut.next_index.items() for i in range(count) for m in range(GROUP[task])]
    assert found == Counter(planned), (found - Counter(planned), Counter(planned) - found, story)
