"""The submission window: little more goes out than there are slots, in order, in few graphs, and what waits can be taken back."""

from __future__ import annotations

from distributed import Client, Scheduler, Worker

from rollart.rollout.window import SubmissionWindow, cluster_slots
from rollart.types import Attempt, Episode


def attempts(count: int, task: str = "lake", start: int = 0) -> list[Attempt]:
    return [Attempt(Episode(task, i), 0) for i in range(start, start + count)]


class Out:
    """What was started, graph by graph."""

    def __init__(self) -> None:
        self.graphs: list[list[Attempt]] = []

    def __call__(self, part: list[Attempt]) -> None:
        self.graphs.append(part)

    @property
    def sizes(self) -> list[int]:
        return [len(g) for g in self.graphs]

    @property
    def order(self) -> list[Attempt]:
        return [a for g in self.graphs for a in g]


def test_a_quarter_more_than_the_slots_goes_out_at_once_and_the_rest_in_order_as_others_end() -> None:
    window, out, work = SubmissionWindow({"PLAY": 16}), Out(), attempts(30)
    window.submit("PLAY", work, out)
    assert out.sizes == [20]
    assert window.waiting() == {"PLAY": 10}
    window.ended("PLAY")
    assert out.sizes == [20], "a graph of one would cost as much as one of two"
    window.ended("PLAY")
    assert out.sizes == [20, 2]
    window.ended("PLAY", 20)
    assert out.order == work
    assert window.waiting() == {}


def test_the_last_that_wait_go_out_also_if_they_are_fewer_than_a_graph_should_hold() -> None:
    window, out = SubmissionWindow({"PLAY": 64}), Out()
    window.submit("PLAY", attempts(81), out)
    window.ended("PLAY")
    assert out.sizes == [80, 1]


def test_what_cannot_start_yet_holds_up_nothing_that_needs_another_resource() -> None:
    window, out = SubmissionWindow({"PLAY": 4, "BROWSE": 4}), Out()
    window.submit("PLAY", attempts(50), out)
    window.submit("BROWSE", attempts(3, "web"), out)
    assert out.sizes == [5, 3]


def test_workers_that_come_get_work_and_where_all_are_gone_nothing_goes_out() -> None:
    window, out = SubmissionWindow({}), Out()
    window.submit("PLAY", attempts(12), out)
    assert out.sizes == []
    window.resize({"PLAY": 4})
    window.resize({"PLAY": 8})
    assert out.sizes == [5, 5]
    window.resize({})
    window.ended("PLAY", 10)
    assert window.waiting() == {"PLAY": 2}
    window.resize({"PLAY": 8})
    assert out.sizes == [5, 5, 2]


def test_what_evaluates_goes_before_all_that_waits() -> None:
    window, trains, evaluates = SubmissionWindow({"PLAY": 4}), Out(), Out()
    window.submit("PLAY", attempts(50), trains)
    held_out = [Attempt(Episode("lake", i, "evaluate"), 0) for i in range(7)]
    window.submit("PLAY", held_out, evaluates)
    window.ended("PLAY", 5)
    window.ended("PLAY", 5)
    assert evaluates.order == held_out
    assert trains.order == attempts(8)


def test_what_waits_can_be_taken_back_by_whom_it_belongs_to() -> None:
    window, mine, yours, work = SubmissionWindow({"PLAY": 4}), Out(), Out(), attempts(9)
    window.submit("PLAY", work, mine)
    window.submit("PLAY", work[5:], yours)
    assert window.withdraw(set(work), mine) == set(work[5:])
    window.ended("PLAY", 5)
    assert mine.order == work[:5]
    assert yours.order == work[5:]


async def test_the_slots_are_those_of_all_workers_that_take_tasks_by_resource() -> None:
    async with Scheduler(protocol="inproc", dashboard=False) as scheduler:
        one = Worker(scheduler.address, nthreads=1, resources={"PLAY": 6, "JUDGE": 2}, dashboard=False)
        other = Worker(scheduler.address, nthreads=1, resources={"PLAY": 3}, dashboard=False)
        async with one, other, Client(scheduler.address, asynchronous=True) as client:
            assert await client.run_on_scheduler(cluster_slots) == {"PLAY": 9, "JUDGE": 2}
            scheduler.handle_worker_status_change("paused", one.address, "leaving, or short of memory")
            assert await client.run_on_scheduler(cluster_slots) == {"PLAY": 3}
