"""Several ranks write one version; it reads like any other, and exists only once all of it is there."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Split
from torch.testing._internal.distributed.fake_pg import FakeStore

from storage.arrays.distributed_tensors import own_part
from storage.errors import Damaged, PartRefused, PartsMissing, PublishTooLong, ShardsRefused, UnsupportedTensor, VersionPassed, VersionTaken
from storage.format import layout
from storage.format.dtypes import TORCH_OF
from storage.version import Version
from storage.weights import Shard, WeightStore, new_attempt
from tests.storage.tensors import of_bits, same

V0, V1 = Version(0, 0), Version(0, 1)


@pytest.fixture
def weights(place):
    return WeightStore(*place)


def whole_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "embed": torch.randn(12, 4).bfloat16(), "up": torch.randn(6, 8), "norm": torch.ones(4), "scale": torch.tensor(2.5),
        "none": torch.zeros(0, 3),
    }  # fmt: skip


def publish_all(weights: WeightStore, state: dict[str, torch.Tensor], version: Version, attempt: str, ranks: tuple[int, ...] = (0, 1, 2)) -> None:
    """Rank 0 and 1 have halves of the rows of `embed`, rank 1 and 2 of the columns of `up`; the rest is rank 2's."""
    rows, columns = state["embed"].shape, state["up"].shape
    parts = {
        0: ({"embed": state["embed"][:5], "none": state["none"]}, {"embed": Shard((0, 0), tuple(rows))}),
        1: (
            {"embed": state["embed"][5:], "up": state["up"][:, :3], "head": state["embed"][:0]},
            {"embed": Shard((5, 0), tuple(rows)), "up": Shard((0, 0), tuple(columns)), "head": Shard((7, 0), (7, 4))},
        ),
        2: (
            {"up": state["up"][:, 3:], "norm": state["norm"], "scale": state["scale"], "head": state["embed"][:7]},
            {"up": Shard((0, 3), tuple(columns))},
        ),
    }
    for rank in ranks:
        held, shards = parts[rank]
        weights.publish_part(held, version=version, attempt=attempt, rank=rank, ranks=3, shards=shards)


def test_a_version_of_three_ranks_reads_as_one(weights):
    state, attempt = whole_state(), new_attempt()
    publish_all(weights, state, V0, attempt)
    assert weights.versions() == []
    assert weights.commit_parts(V0, attempt, 3, metadata={"loss": 1}, files={"config.json": b"{}"}) == V0
    commit = weights.commit(V0)
    assert (commit.requires, commit.metadata, weights.file(V0, "config.json")) == (("shards",), {"loss": 1}, b"{}")
    wanted = {**state, "head": state["embed"][:7]}
    pulled = weights.pull()
    assert sorted(pulled) == sorted(wanted)
    assert all(same(pulled[name], tensor) for name, tensor in wanted.items())
    slices = {"embed": slice(3, 9), "up": (slice(2, 5), slice(1, 6)), "norm": 2}
    cut = weights.pull(slices=slices)
    assert all(same(cut[name], state[name][part]) for name, part in slices.items())
    out = {"embed": torch.zeros(4, 12).bfloat16().t(), "up": torch.zeros(6, 8)}
    into = weights.pull(out=out)
    assert all(into[name] is tensor and torch.equal(tensor, state[name]) for name, tensor in out.items())


def test_a_tensor_that_one_rank_has_all_of_needs_no_reader_of_shards(weights):
    attempt = new_attempt()
    weights.publish_part({"a": torch.ones(3)}, version=V0, attempt=attempt, rank=0, ranks=2)
    weights.publish_part({"b": torch.zeros(2)}, version=V0, attempt=attempt, rank=1, ranks=2)
    weights.commit_parts(V0, attempt, 2)
    assert weights.commit(V0).requires == ()
    assert {name: tensor.tolist() for name, tensor in weights.pull().items()} == {"a": [1, 1, 1], "b": [0, 0]}


def test_a_rank_reads_its_own_part_at_its_own_cost(weights, monkeypatch):
    state = {"w": torch.randn(256, 1024)}
    attempt = new_attempt()
    for rank in range(4):
        held = {"w": state["w"][64 * rank : 64 * rank + 64]}
        weights.publish_part(held, version=V0, attempt=attempt, rank=rank, ranks=4, shards={"w": Shard((64 * rank, 0), (256, 1024))})
    weights.commit_parts(V0, attempt, 4)
    backend = type(weights.objects._backend)
    fetched = []
    read_into = backend.read_into
    monkeypatch.setattr(backend, "read_into", lambda self, path, *more: (fetched.append(path), read_into(self, path, *more))[1])
    assert torch.equal(weights.pull(slices={"w": slice(64, 128)})["w"], state["w"][64:128])
    assert len(fetched) == 1 and "float32-1/c/0" in fetched[0]


def test_ranks_that_have_not_written_are_named_and_may_still_do_so(weights):
    attempt = new_attempt()
    publish_all(weights, whole_state(), V0, attempt, (1,))
    with pytest.raises(PartsMissing, match="nothing of ranks 0, 2 is there") as caught:
        weights.commit_parts(V0, attempt, 3)
    assert caught.value.ranks == (0, 2)
    publish_all(weights, whole_state(), V0, attempt, (0, 2))
    assert weights.commit_parts(V0, attempt, 3) == V0
    with pytest.raises(PartsMissing):
        weights.commit_parts(V1, new_attempt(), 1)


WRONG = {
    "gap": ({0: (0, 4), 1: (5, 8)}, r"'w' of \[8\] .* ranks 0, 1 .*7 values for 8"),
    "overlap": ({0: (0, 5), 1: (4, 8)}, "9 values for 8"),
    "twice": ({0: (0, 8), 1: (0, 8)}, "16 values for 8"),
    "gap and overlap": ({0: (0, 4), 1: (2, 6)}, "8 values for 8"),
}


@pytest.mark.parametrize("place", ["memory"], indirect=True)
@pytest.mark.parametrize("wrong", WRONG)
def test_shards_that_do_not_make_up_their_tensor_are_refused_by_its_name(weights, wrong):
    spans, said = WRONG[wrong]
    attempt = new_attempt()
    for rank, (start, end) in spans.items():
        weights.publish_part({"w": torch.ones(end - start)}, version=V0, attempt=attempt, rank=rank, ranks=2, shards={"w": Shard((start,), (8,))})
    with pytest.raises(ShardsRefused, match=said):
        weights.commit_parts(V0, attempt, 2)
    assert weights.versions() == []


@pytest.mark.parametrize("place", ["memory"], indirect=True)
def test_ranks_that_disagree_on_a_tensor_are_named(weights):
    for other, said in ((torch.ones(4).half(), "float16"), (torch.ones(4, 1), r"\[4, 1\]")):
        attempt = new_attempt()
        weights.publish_part({"w": torch.ones(4)}, version=V0, attempt=attempt, rank=0, ranks=2, shards={"w": Shard((0,), (8,))})
        shards = {"w": Shard((4,), (8,))} if other.ndim == 1 else {}
        weights.publish_part({"w": other}, version=V0, attempt=attempt, rank=1, ranks=2, shards=shards)
        with pytest.raises(ShardsRefused, match=rf"float32 \[8\] on rank 0 and .*{said}.* on rank 1"):
            weights.commit_parts(V0, attempt, 2)


@pytest.mark.parametrize("place", ["memory"], indirect=True)
@pytest.mark.parametrize("shard", [Shard((5,), (8,)), Shard((-1,), (8,)), Shard((0, 0), (8,)), Shard((0,), (3,)), Shard((0, 0), (8, 1))])
def test_a_shard_outside_of_its_tensor_is_refused_before_anything_is_written(weights, shard):
    with pytest.raises(ShardsRefused, match="'w'"):
        weights.publish_part({"w": torch.ones(4)}, version=V0, attempt=new_attempt(), rank=0, ranks=1, shards={"w": shard})
    with pytest.raises(ShardsRefused, match="'v'"):
        weights.publish_part({"w": torch.ones(4)}, version=V0, attempt=new_attempt(), rank=0, ranks=1, shards={"v": Shard((0,), (4,))})
    assert weights.objects.list() == []


def test_what_cannot_be_a_rank_or_an_attempt_is_refused(tmp_path):
    weights = WeightStore(str(tmp_path))
    good = "0" * 32
    ranks_and_attempts = [(2, 2, good), (-1, 2, good), (True, 2, good), (0, True, good), ("0", 1, good), (0, "1", good)]
    for rank, ranks, attempt in [*ranks_and_attempts, (0, 1, "../" * 10 + "xx"), (0, 1, ""), (0, 1, 5)]:
        with pytest.raises(PartRefused, match=r"rank|attempt"):
            weights.publish_part({}, version=V0, attempt=attempt, rank=rank, ranks=ranks)
    for attempt, ranks in ((good, 0), (good, True), ("bad", 1)):
        with pytest.raises(PartRefused, match=r"ranks|'bad' can't be an attempt"):
            weights.commit_parts(V0, attempt, ranks)
    assert weights.objects.list() == []
    weights.publish_part({}, version=V0, attempt="0" * 32, rank=0, ranks=2)
    with pytest.raises(ShardsRefused, match="one of 2 ranks, and 1 are committed"):
        weights.commit_parts(V0, "0" * 32, 1)


def test_tensors_that_are_tied_on_all_ranks_come_back_as_one(weights):
    w, attempt = torch.randn(8, 3), new_attempt()
    for rank in range(2):
        half = w[4 * rank : 4 * rank + 4]
        shards = {name: Shard((4 * rank, 0), (8, 3)) for name in ("embed", "head")}
        weights.publish_part({"embed": half, "head": half}, version=V0, attempt=attempt, rank=rank, ranks=2, shards=shards)
    weights.commit_parts(V0, attempt, 2)
    pulled = weights.pull()
    assert pulled["embed"] is pulled["head"] and torch.equal(pulled["head"], w)
    assert weights.commit(V0).tensors["head"].alias_of == "embed"


@pytest.mark.parametrize("place", ["memory"], indirect=True)
def test_tensors_that_are_tied_on_one_rank_only_are_refused(weights):
    w, attempt = torch.randn(8, 3), new_attempt()
    for rank in range(2):
        half = w[4 * rank : 4 * rank + 4]
        shards = {name: Shard((4 * rank, 0), (8, 3)) for name in ("embed", "head")}
        held = {"embed": half, "head": half if rank else half.clone()}
        weights.publish_part(held, version=V0, attempt=attempt, rank=rank, ranks=2, shards=shards)
    with pytest.raises(ShardsRefused, match="'head' is the same memory as 'embed' on some ranks"):
        weights.commit_parts(V0, attempt, 2)


def test_another_s_version_stays_and_the_parts_of_the_loser_go(weights):
    mine, theirs = new_attempt(), new_attempt()
    publish_all(weights, whole_state(), V0, mine)
    publish_all(weights, whole_state(), V0, theirs)
    assert weights.commit_parts(V0, theirs, 3) == V0
    with pytest.raises(VersionTaken):
        weights.commit_parts(V0, mine, 3)
    with pytest.raises(VersionTaken):
        publish_all(weights, whole_state(), V0, mine)
    weights.publish({}, version=Version(0, 9), background=False)
    with pytest.raises(VersionPassed):
        publish_all(weights, whole_state(), V1, mine)
    assert torch.equal(weights.pull(V0)["up"], whole_state()["up"])


def test_parts_of_long_ago_are_not_committed(weights, monkeypatch):
    attempt = new_attempt()
    publish_all(weights, whole_state(), V0, attempt)
    monkeypatch.setattr(layout, "LONGEST_PUBLISH_S", -1.0)
    with pytest.raises(PublishTooLong):
        weights.commit_parts(V0, attempt, 3)
    assert weights.objects.list() == []


@pytest.mark.many_requests
def test_a_kill_at_every_write_leaves_the_previous_version_and_the_attempt_can_be_repeated(weights, dying, killed):
    state = whole_state()
    weights.publish(state, version=V0, background=False)
    changed = {name: tensor + 1 for name, tensor in state.items()}
    writes = 0
    while True:
        broken, attempt = WeightStore.over(dying(writes)), new_attempt()
        try:
            publish_all(broken, changed, V1, attempt)
            broken.commit_parts(V1, attempt, 3)
        except killed:
            assert weights.newest() == V0
            assert torch.equal(weights.pull()["up"], state["up"])
            writes += 1
        else:
            break
    assert writes == sum(1 + 2 * arrays + 1 for arrays in (1, 2, 2)) + 1, (
        "the group's and the arrays' metadata, a chunk each, the records, the commit"
    )
    assert torch.equal(weights.pull()["up"], changed["up"])


@pytest.mark.parametrize("place", ["memory"], indirect=True)
def test_a_damaged_record_of_a_rank_is_found(weights):
    attempt = new_attempt()
    publish_all(weights, whole_state(), V0, attempt)
    path = f"{layout.data_prefix(V0, attempt)}/parts/000001.json"
    good = weights.objects.read(path)
    other = weights.objects.read(path.replace("000001", "000002"))
    for bad in (good[: len(good) // 2], good.replace(b'"rank":1', b'"rank":2'), b"[" * 10**5, b"", other):
        weights.objects.write(path, bad)
        with pytest.raises(Damaged, match=r"parts/000001\.json"):
            weights.commit_parts(V0, attempt, 3)
    weights.objects.write(path, good)
    assert weights.commit_parts(V0, attempt, 3) == V0


def test_plain_zarr_opens_the_arrays_of_each_rank(place):
    weights, state, attempt = WeightStore(*place), whole_state(), new_attempt()
    publish_all(weights, state, V0, attempt)
    weights.commit_parts(V0, attempt, 3)
    group = zarr.open_group(f"{weights.url}/{layout.data_prefix(V0, attempt)}", mode="r", storage_options=place[1] or None)
    assert np.array_equal(group["bfloat16-0"][:], state["embed"][:5].reshape(-1).view(torch.uint16).numpy())
    assert np.array_equal(group["float32-1"][:], state["up"][:, :3].reshape(-1).numpy())


@st.composite
def grids(draw):
    """A tensor, where it is cut in each dimension, and which rank has which box."""
    shape = draw(st.lists(st.integers(1, 6), max_size=3))
    tensor = of_bits(TORCH_OF[draw(st.sampled_from(sorted(TORCH_OF)))], *shape, seed=draw(st.integers(0, 9)))
    boxes = [()]
    for size in shape:
        ends = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        boxes = [(*box, slice(a, b)) for box in boxes for a, b in itertools.pairwise(ends)]
    return tensor, draw(st.permutations(boxes))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(grid=grids(), data=st.data())
def test_any_tensor_in_any_boxes_comes_back_whole_and_in_any_part(tmp_path_factory, grid, data):
    tensor, boxes = grid
    weights, attempt = WeightStore(str(tmp_path_factory.mktemp("parts"))), new_attempt()
    for rank, box in enumerate(boxes):
        shard = Shard(tuple(cut.start for cut in box), tuple(tensor.shape))
        weights.publish_part({"w": tensor[box]}, version=V0, attempt=attempt, rank=rank, ranks=len(boxes), shards={"w": shard})
    weights.commit_parts(V0, attempt, len(boxes))
    assert same(weights.pull()["w"], tensor)
    part = tuple(slice(a := data.draw(st.integers(0, size)), data.draw(st.integers(a, size))) for size in tensor.shape)
    assert same(weights.pull(slices={"w": part})["w"], tensor[part])


def distributed_state(ranks: int) -> dict[str, torch.Tensor]:
    line = init_device_mesh("cpu", (ranks,))
    square = init_device_mesh("cpu", (2, ranks // 2))
    return {
        "rows": distribute_tensor(torch.arange(15.0).view(5, 3), line, [Split(0)], src_data_rank=None),
        "few": distribute_tensor(torch.arange(2.0), line, [Split(0)], src_data_rank=None),
        "hybrid": distribute_tensor(torch.arange(12.0).view(4, 3), square, [Replicate(), Split(1)], src_data_rank=None),
        "both": distribute_tensor(torch.arange(15.0).view(5, 3), square, [Split(0), Split(1)], src_data_rank=None),
        "copied": distribute_tensor(torch.arange(3.0), line, [Replicate()], src_data_rank=None),
        "plain": torch.ones(2),
    }


def test_a_model_that_torch_spread_over_a_mesh_is_written_by_all_of_its_ranks(tmp_path):
    weights, attempt = WeightStore(str(tmp_path / "store")), new_attempt()
    for rank in range(4):
        # (Torch's group that sends nothing: where a rank's part lies is worked out without the others.)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        try:
            held, shards = own_part(distributed_state(4), rank)
        finally:
            dist.destroy_process_group()
        assert ("copied" in held, "plain" in held) == (rank == 0, rank == 0)
        assert ("hybrid" in held) == (rank < 2)
        weights.publish_part(held, version=V0, attempt=attempt, rank=rank, ranks=4, shards=shards)
    weights.commit_parts(V0, attempt, 4)
    pulled = weights.pull()
    wanted = {
        "rows": torch.arange(15.0).view(5, 3), "few": torch.arange(2.0), "hybrid": torch.arange(12.0).view(4, 3),
        "both": torch.arange(15.0).view(5, 3), "copied": torch.arange(3.0), "plain": torch.ones(2),
    }  # fmt: skip
    assert sorted(pulled) == sorted(wanted)
    assert all(torch.equal(pulled[name], tensor) for name, tensor in wanted.items())


def test_a_tensor_whose_parts_have_to_be_added_up_is_refused(tmp_path):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        tensor = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()], run_check=False)
        with pytest.raises(UnsupportedTensor, match=r"'w'.*redistribute"):
            own_part({"w": tensor}, 0)
    finally:
        dist.destroy_process_group()
