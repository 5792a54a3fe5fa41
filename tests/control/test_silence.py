"""When silence is looked at, what is told of it, and what counts as lost or as wanted in vain."""

from __future__ import annotations

from rollart.control.silence import LINES, Absence, Absences, Placed, Silence, Whereabouts, at_work, lost, place, tell
from rollart.types import Attempt, Episode


def attempt(index: int = 0, task: str = "lake", purpose: str = "train") -> Attempt:
    return Attempt(Episode(task, index, purpose), 0)  # type: ignore[arg-type]


def test_silence_is_looked_at_after_a_while_and_then_each_time_that_it_has_doubled() -> None:
    silence = Silence(60.0)
    assert [s for s in range(0, 601, 10) if silence.due(s)] == [60, 120, 240, 480]


def test_an_end_starts_the_silence_anew() -> None:
    silence = Silence(60.0)
    assert silence.due(130.0) and not silence.due(200.0)
    assert not silence.due(5.0) and not silence.due(59.0) and silence.due(61.0) and silence.due(125.0)


def test_what_is_told_is_grouped_by_task_and_worker_with_the_most_first_and_the_longest_time() -> None:
    found = [
        *(Whereabouts(attempt(i), "working", "player-0", "in reset", 70.0 + i) for i in range(6)),
        *(Whereabouts(attempt(10 + i), "working", "player-0", "for engine http://a:1", 12.0) for i in range(3)),
        Whereabouts(attempt(20), "queued", "player-0"),
        Whereabouts(attempt(30), "working", "judge-0", "", 3.0),
        *(Whereabouts(attempt(40 + i), "no_worker", "PLAYER") for i in range(4)),
        *(Whereabouts(attempt(50 + i), "lost", "PLAYER") for i in range(2)),
        *(Whereabouts(attempt(60 + i, "sum", "evaluate"), "unanswered", "player-1") for i in range(5)),
        *(Whereabouts(attempt(70 + i), "held") for i in range(3)),
    ]
    assert tell(found) == [
        "10 trajectories of lake on worker player-0: 6 in reset for 75 s, 3 waiting for engine http://a:1 for 12 s, 1 waiting for a slot",
        "5 evaluations of sum on worker player-1, which does not answer",
        "4 trajectories of lake: waiting for a worker with PLAYER, and there is none",
        "3 trajectories of lake: held back until others end",
        "2 trajectories of lake: lost, with a worker with PLAYER there and none that knows of it",
        "1 trajectory of lake on worker judge-0: 1 at work for 3 s",
    ]


def test_what_is_told_has_few_lines_and_counts_the_rest() -> None:
    lines = tell(Whereabouts(attempt(i), "working", f"player-{i:02d}", "in step") for i in range(20))
    assert len(lines) == LINES and lines[-1] == f"and {20 - LINES + 1} more elsewhere"


def test_an_attempt_is_where_the_first_of_its_tasks_is_that_has_not_ended() -> None:
    a, there = attempt(), {"PLAYER"}
    on_worker = {"t": Placed("processing", "tcp://1", "PLAYER"), "r": Placed("waiting", None, "JUDGE")}
    assert place(a, ["t", "r"], on_worker, there) == ("tcp://1", "t")
    scoring = {"t": Placed("memory", None, "PLAYER"), "r": Placed("no-worker", None, "JUDGE")}
    assert place(a, ["t", "r"], scoring, there) == Whereabouts(a, "no_worker", "JUDGE")
    assert place(a, ["t", "r"], scoring, {"JUDGE"}) == Whereabouts(a, "lost", "JUDGE")
    assert place(a, ["t"], {"t": Placed("erred", None, "PLAYER")}, there) == Whereabouts(a, "ended")
    assert place(a, [], {}, there) == Whereabouts(a, "held")
    assert place(a, ["t"], {}, there) == Whereabouts(a, "lost", "its resource")


def test_only_what_two_looks_find_lost_is_lost() -> None:
    one, other, third = attempt(1), attempt(2), attempt(3)
    before = [Whereabouts(one, "lost"), Whereabouts(other, "lost"), Whereabouts(third, "working", "player-0")]
    now = [Whereabouts(one, "lost"), Whereabouts(other, "working", "player-0"), Whereabouts(third, "lost")]
    assert lost(before, now) == [one]


def test_a_resource_that_is_gone_is_told_once_and_when_it_is_back() -> None:
    absences = Absences(grace_s=3.0, limit_s=20.0)
    assert absences.see({"PLAYER": 4}, 100.0) == [] and absences.see({"PLAYER": 4}, 102.0) == []
    assert absences.see({"PLAYER": 6}, 103.0) == [
        "no worker has the resource PLAYER any more: 6 tasks wait for one, and the run fails if none is there within 20 s (rollout.worker_wait)"
    ]
    assert absences.see({"PLAYER": 6}, 110.0) == [] and absences.hopeless({"PLAYER": 6}, 119.0) is None
    assert absences.see({}, 115.0) == ["nothing waits in vain for the resource PLAYER any more, after 15 s"]
    assert absences.see({"PLAYER": 6}, 119.0) == [] and absences.hopeless({"PLAYER": 6}, 138.0) is None


def test_a_resource_that_is_gone_for_too_long_is_hopeless() -> None:
    absences = Absences(grace_s=3.0, limit_s=20.0)
    absences.see({"PLAYER": 4}, 100.0)
    assert absences.hopeless({"PLAYER": 9, "JUDGE": 1}, 121.0) == Absence("PLAYER", 9, 21.0)


def test_a_worker_that_was_started_again_within_seconds_is_not_worth_a_word() -> None:
    absences = Absences(grace_s=3.0, limit_s=20.0)
    assert absences.see({"PLAYER": 4}, 100.0) == [] and absences.see({}, 102.0) == []


def test_an_attempt_is_taken_care_of_while_a_worker_has_it_and_goes_on() -> None:
    attempts = [Attempt(Episode("lake", i), 0) for i in range(7)]
    kinds = [("working", 3.0), ("working", 900.0), ("queued", 0.0), ("ended", 0.0), ("unanswered", 0.0), ("no_worker", 0.0), ("lost", 0.0)]
    found = [Whereabouts(attempt, kind, "w", "in step", seconds) for attempt, (kind, seconds) in zip(attempts, kinds, strict=True)]  # type: ignore[arg-type]
    assert at_work(found, within_s=300.0) == [attempts[0], attempts[2], attempts[3]]
