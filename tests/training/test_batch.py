import random
from dataclasses import replace

import pytest

from rollart.training.batch import build_batch
from rollart.training.errors import BatchError, TransformError
from rollart.training.microbatch import micro_batches
from rollart.training.settings import BatchSettings
from rollart.types import Attempt, Episode, SamplingTransform, Segment, Trajectory


def _trajectory(*segments: Segment, member: int = 0) -> Trajectory:
    return Trajectory(Attempt(Episode("t", 0), member), "n", 0, 0, list(segments), "terminated")


def _segment(prompt: list[int], response: list[int], tail: list[int] | None = None, transform: SamplingTransform | None = None) -> Segment:
    segment = Segment(transform or SamplingTransform())
    segment.append_prompt(prompt)
    segment.append_response(response, [-1.0 - i for i in range(len(response))], [3] * len(response), "stop")
    segment.append_prompt(tail or [])
    return segment


def test_every_sampled_position_is_a_target_predicted_by_the_position_before_it() -> None:
    trajectories = [_trajectory(_segment([5, 6], [7, 8], [9, 9]), member=0), _trajectory(_segment([1, 2, 3], [4]), member=1)]
    batch = build_batch(trajectories, {t.attempt: 0.5 + t.attempt.member for t in trajectories}, step=4)
    (micro,) = micro_batches(batch.sequences, BatchSettings())
    assert micro.ids.tolist() == [[5, 6, 7], [1, 2, 3]]  # the last trained token and what follows it predict nothing
    assert micro.index.tolist() == [1, 2, 5]
    assert micro.targets.tolist() == [7, 8, 4]
    assert micro.behaviour.tolist() == [-1.0, -2.0, -1.0]
    assert micro.advantages.tolist() == [0.5, 0.5, 1.5]
    assert micro.versions.tolist() == [3, 3, 3]
    assert micro.trajectory.tolist() == [0, 0, 1]


def test_padding_that_equals_the_end_token_hides_nothing() -> None:
    long, ended = _trajectory(_segment([1, 1, 1, 1], [2, 2]), member=0), _trajectory(_segment([5], [0, 0]), member=1)
    batch = build_batch([long, ended], {long.attempt: 1.0, ended.attempt: 1.0}, step=0)
    (micro,) = micro_batches(batch.sequences, BatchSettings())
    assert micro.targets[micro.trajectory == 0].tolist() == [0, 0]  # sorted by length: the shorter one is row 0
    assert micro.weights[micro.trajectory == 0].tolist() == [0.25, 0.25]


@pytest.mark.parametrize("denominator", ["token", "trajectory"])
def test_weights_sum_to_one_over_all_micro_batches_and_do_not_depend_on_segments(denominator: str) -> None:
    whole = _trajectory(_segment([1], [2, 3, 4, 5]), member=0)
    parted = _trajectory(_segment([1], [2, 3, 4]), _segment([1, 2], [5]), member=1)
    short = _trajectory(_segment([1, 2, 3], [4]), member=2)
    batch = build_batch([whole, parted, short], {t.attempt: float(t.attempt.member) for t in (whole, parted, short)}, step=0)
    micros = micro_batches(batch.sequences, BatchSettings.model_validate({"denominator": denominator, "token_budget": 4}))
    assert len(micros) > 1
    by_trajectory = [sum(float(m.weights[m.advantages == member].sum()) for m in micros) for member in range(3)]
    expected = [4 / 9, 4 / 9, 1 / 9] if denominator == "token" else [1 / 3, 1 / 3, 1 / 3]
    assert by_trajectory == pytest.approx(expected, abs=1e-12)


def test_arrival_order_changes_nothing(make_trajectories) -> None:
    trajectories = make_trajectories()
    advantages = {t.attempt: float(i) for i, t in enumerate(trajectories)}
    first = build_batch(trajectories, advantages, 0)
    second = build_batch(random.Random(1).sample(trajectories, len(trajectories)), advantages, 0)
    assert len(first.sequences) == len(second.sequences)
    for a, b in zip(first.sequences, second.sequences, strict=True):
        assert a.ids.equal(b.ids) and a.advantages.equal(b.advantages) and a.trajectory == b.trajectory


def test_minibatches_hold_whole_trajectories_each_exactly_once(make_trajectories) -> None:
    trajectories = make_trajectories()
    batch = build_batch(trajectories, {t.attempt: 1.0 for t in trajectories}, 0)
    parts = [[s.trajectory for s in part] for part in batch.split(3)]
    assert [sorted(set(p)) for p in parts] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert sum(map(len, parts)) == len(batch.sequences)
    alone = build_batch(trajectories[:1], {trajectories[0].attempt: 1.0}, 0)
    assert [len(part) for part in alone.split(4)] == [len(trajectories[0].segments)]


def test_micro_batches_keep_the_budget_and_pad_little(make_trajectories) -> None:
    trajectories = make_trajectories((8, 8, 8))
    batch = build_batch(trajectories, {t.attempt: 1.0 for t in trajectories}, 0)
    micros = micro_batches(batch.sequences, BatchSettings(token_budget=40))
    longest = max(s.inputs for s in batch.sequences)
    assert all(m.ids.numel() <= 40 or len(m.ids) == 1 for m in micros)
    places = sum(m.ids.numel() for m in micros)
    assert places - sum(m.real for m in micros) < 0.1 * places < longest * len(batch.sequences)


@pytest.mark.parametrize(
    "transform",
    [SamplingTransform(top_p=0.9), SamplingTransform(top_k=5), SamplingTransform(min_p=0.1), SamplingTransform(temperature=0.0)],
)
def test_a_sampling_transform_that_cannot_be_replayed_is_refused(transform: SamplingTransform) -> None:
    trajectory = _trajectory(_segment([1], [2], transform=transform))
    with pytest.raises(TransformError, match="segment 0 of attempt train/t/0/0/0"):
        build_batch([trajectory], {trajectory.attempt: 1.0}, 0)


def test_what_does_not_fit_together_is_refused_by_name() -> None:
    trajectory = _trajectory(_segment([1], [2]))
    with pytest.raises(BatchError, match="no advantage"):
        build_batch([trajectory], {}, 0)
    with pytest.raises(BatchError, match="twice"):
        build_batch([trajectory, replace(trajectory, nonce="m")], {trajectory.attempt: 1.0}, 0)
    with pytest.raises(BatchError, match="starts with a sampled token"):
        build_batch([_trajectory(_segment([], [2]))], {trajectory.attempt: 1.0}, 0)


def test_a_segment_without_a_sampled_token_is_no_sequence() -> None:
    trajectory = _trajectory(_segment([1, 2], []))
    batch = build_batch([trajectory], {trajectory.attempt: 1.0}, 0)
    assert batch.sequences == () and batch.trajectories == 1
    assert batch.split(3) == [()]
    assert micro_batches((), BatchSettings()) == []
