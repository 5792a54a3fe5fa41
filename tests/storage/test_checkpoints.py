from __future__ import annotations

import errno
import os
import pickle
from functools import partial

import pytest
import torch

from storage.arrays.packing import pack
from storage.arrays.parts import Shard
from storage.arrays.writing import new_attempt
from storage.checkpoints import CheckpointStore
from storage.errors import Damaged, PartsMissing, StoreUnreachable, VersionMissing, VersionTaken
from storage.format import layout
from storage.version import Version


@pytest.fixture
def checkpoints(place):
    return CheckpointStore(*place)


def content(step: int) -> tuple[dict[str, torch.Tensor], dict]:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    arrays = {f"weights/{name}": tensor for name, tensor in model.state_dict().items()}
    for i, moments in optimizer.state_dict()["state"].items():
        arrays |= {f"optimizer/{i}/{name}": tensor for name, tensor in moments.items()}
    arrays["random/torch"] = torch.get_rng_state()
    documents = {"ledger": {"trained": list(range(step)), "dropped": {"a": None}}, "counters": [step, 0.1], "config": "text"}
    return arrays, documents


def test_a_checkpoint_comes_back_whole(checkpoints):
    arrays, documents = content(7)
    assert checkpoints.save(7, 0, arrays=arrays, documents=documents) == Version(0, 7)
    found = checkpoints.load()
    assert found.version == Version(0, 7)
    assert found.documents == documents
    assert list(found.arrays) == list(arrays)
    assert all(torch.equal(found.arrays[name], tensor) for name, tensor in arrays.items())


def test_going_back_opens_a_lineage_whose_newest_is_never_of_the_abandoned_tail(checkpoints):
    for step in (0, 5, 10):
        checkpoints.save(step, 0, arrays={"x": torch.tensor(step)}, documents={})
    assert checkpoints.newest() == Version(0, 10)
    lineage = checkpoints.open_lineage(Version(0, 5))
    assert checkpoints.load().arrays["x"].item() == 5
    checkpoints.save(6, lineage, arrays={"x": torch.tensor(6)}, documents={})
    assert checkpoints.newest() == Version(1, 6)
    assert checkpoints.versions() == [Version(0, 0), Version(0, 5), Version(0, 10), Version(1, 6)]
    assert checkpoints.load(Version(0, 10)).arrays["x"].item() == 10


def test_a_saved_checkpoint_is_never_replaced(checkpoints):
    checkpoints.save(1, 0, arrays={"x": torch.tensor(1)}, documents={"d": 1})
    with pytest.raises(VersionTaken):
        checkpoints.save(1, 0, arrays={"x": torch.tensor(2)}, documents={"d": 2})
    assert checkpoints.load().documents == {"d": 1}
    with pytest.raises(VersionMissing):
        checkpoints.load(Version(0, 2))


@pytest.mark.many_requests
def test_a_kill_at_every_write_leaves_the_previous_checkpoint_whole(checkpoints, dying, killed):
    arrays, documents = content(1)
    checkpoints.save(1, 0, arrays=arrays, documents=documents)
    writes = 0
    while True:
        try:
            CheckpointStore.over(dying(writes)).save(2, 0, arrays=arrays, documents={**documents, "counters": [2]})
        except killed:
            found = checkpoints.load()
            assert (found.version, found.documents) == (Version(0, 1), documents)
            writes += 1
        else:
            break
    assert writes > 6
    assert checkpoints.load().documents["counters"] == [2]


def test_a_changed_cut_or_missing_object_is_an_error_that_names_it(checkpoints):
    arrays, documents = content(1)
    checkpoints.save(1, 0, arrays=arrays, documents=documents)
    objects = checkpoints._versioned.store
    prefix = layout.data_prefix(Version(0, 1), checkpoints.commit(Version(0, 1)).attempt)
    for path in (f"{prefix}/documents/ledger.json", f"{prefix}/float32/c/0", f"{prefix}/uint8/c/0", "commits/0-00000001.json"):
        good = objects.read(path)
        for bad in (good[:-3], good[:-5] + bytes([good[-5] ^ 1]) + good[-4:]):
            objects.write(path, bad)
            with pytest.raises(Damaged, match=path.removeprefix(prefix).strip("/")) as caught:
                checkpoints.load()
            assert "use another version" in str(caught.value)
        if not path.startswith("commits"):
            objects.delete(path)
            with pytest.raises(Damaged, match="is missing"):
                checkpoints.load()
        objects.write(path, good)
    assert checkpoints.load().documents == documents


@pytest.mark.parametrize("documents", [{"../x": 1}, {"": 1}, {"a/b": 1}, {"a": float("inf")}, {"a": {1, 2}}])
def test_a_document_that_cannot_be_stored_is_refused_before_anything_is_written(tmp_path, documents):
    checkpoints = CheckpointStore(str(tmp_path))
    with pytest.raises((TypeError, ValueError)):
        checkpoints.save(0, 0, arrays={}, documents=documents)
    assert list(tmp_path.iterdir()) == []


class Disk:
    """Records what is synced, renamed and linked, in the order in which it ends or, for a name, begins; files and folders by path."""

    def __init__(self, monkeypatch):
        self.events: list[tuple[str, str]] = []
        self.fails = ""
        fsync, link, replace = os.fsync, os.link, os.replace

        def synced(descriptor):
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if self.fails and self.fails in path:
                raise OSError(errno.EIO, "Input/output error")
            fsync(descriptor)
            self.events.append(("fsync", path))

        def named(what, act):
            def do(source, target):
                self.events.append((what, f"{source} {target}"))
                act(source, target)

            return do

        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(os, "link", named("link", link))
        monkeypatch.setattr(os, "replace", named("rename", replace))

    def synced(self, upto: int) -> list[str]:
        return [path for what, path in self.events[:upto] if what == "fsync"]


def test_every_file_and_folder_of_a_local_checkpoint_reached_the_disk_before_its_commit_and_the_commit_before_save_returns(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    monkeypatch.setattr("storage.checkpoints.pack", partial(pack, chunk_bytes=4096))
    root = tmp_path / "far" / "new"
    CheckpointStore(str(root)).save(0, 0, arrays={"x": torch.ones(9000)}, documents={"d": 1})
    (commit,) = (i for i, (what, _) in enumerate(disk.events) if what == "link")
    before = disk.synced(commit)
    stored = [path for path in (root / "data").rglob("*") if path.is_file()]
    assert len(stored) == 2 + 9 + 1, "the group's and the array's metadata, the chunks, the document"
    for file in stored:
        (i,) = (i for i, (what, names) in enumerate(disk.events) if what == "rename" and names.endswith(f" {file}"))
        name = disk.events[i][1].split()[0]
        assert name in disk.synced(i), "content before its name"
        assert str(file.parent) in disk.synced(commit)[len(disk.synced(i)) :], "the name before the commit"
    folders = [path for path in before if "/.tmp-" not in path]
    inside = [path for path in folders if "/data/v0-" in path]
    assert len(set(inside)) == len(inside), "each once"
    assert set(folders) == {str(path) for file in stored for path in file.parents if path.is_relative_to(tmp_path)}
    assert disk.events[commit - 1][1] == disk.events[commit][1].split()[0], "so is the commit's content"
    assert disk.events[commit + 1 :] == [("fsync", str(root / "commits"))]


@pytest.mark.parametrize("fails", ["/c/.tmp-", "/documents", "/.tmp-", "data/v0-00000001"])
def test_a_checkpoint_whose_data_fails_to_reach_the_disk_does_not_exist(tmp_path, monkeypatch, fails):
    checkpoints = CheckpointStore(str(tmp_path))
    checkpoints.save(0, 0, arrays={"x": torch.ones(5)}, documents={"d": 1})
    disk = Disk(monkeypatch)
    disk.fails = fails
    with pytest.raises(StoreUnreachable, match="Input/output error"):
        checkpoints.save(1, 0, arrays={"x": torch.ones(5)}, documents={"d": 1})
    assert checkpoints.versions() == [Version(0, 0)]
    assert len(list((tmp_path / "data").iterdir())) == 1, "nothing of it stays"
    disk.fails = ""
    checkpoints.save(1, 0, arrays={"x": torch.ones(5)}, documents={"d": 1})
    assert checkpoints.load(Version(0, 1)).documents == {"d": 1}


def test_a_checkpoint_store_travels_by_pickle(checkpoints):
    checkpoints.save(0, 0, arrays={}, documents={"d": [1]})
    assert pickle.loads(pickle.dumps(checkpoints)).load().documents == {"d": [1]}  # noqa: S301


def halves(tensor: torch.Tensor, ranks: int, rank: int) -> tuple[torch.Tensor, Shard]:
    """The rows of `tensor` that a rank has, and where they lie in it."""
    rows = [len(part) for part in torch.arange(len(tensor)).tensor_split(ranks)]
    start = sum(rows[:rank])
    return tensor[start : start + rows[rank]], Shard((start, *(0 for _ in tensor.shape[1:])), tuple(tensor.shape))


def test_ranks_save_their_parts_and_any_number_of_ranks_load_theirs(checkpoints):
    arrays, documents = content(7)
    matrices = {name: value for name, value in arrays.items() if value.ndim == 2}
    attempt = new_attempt()
    for rank in range(2):
        parts = {name: halves(value, 2, rank) for name, value in matrices.items()}
        rest = {name: value for name, value in arrays.items() if name not in matrices} if rank == 0 else {}
        checkpoints.save_part(
            {name: part for name, (part, _) in parts.items()} | rest, version=Version(0, 7), attempt=attempt, rank=rank, ranks=2,
            shards={name: shard for name, (_, shard) in parts.items()},
        )  # fmt: skip
        assert checkpoints.versions() == []
    assert checkpoints.commit_parts(Version(0, 7), attempt, 2, documents=documents) == Version(0, 7)
    whole = checkpoints.load()
    assert whole.documents == documents
    assert whole.arrays.keys() == arrays.keys()
    assert all(torch.equal(whole.arrays[name], value) for name, value in arrays.items())
    for ranks in (3, 5):  # some of the five have no row of three
        for rank in range(ranks):
            mine = {name: halves(value, ranks, rank) for name, value in matrices.items()}
            cut = {name: slice(shard.start[0], shard.start[0] + len(part)) for name, (part, shard) in mine.items()}
            found = checkpoints.load(slices=cut).arrays
            assert all(torch.equal(found[name], part) for name, (part, _) in mine.items())
            assert torch.equal(found["random/torch"], arrays["random/torch"])


def test_a_checkpoint_that_lacks_a_rank_is_none(checkpoints):
    attempt = new_attempt()
    checkpoints.save_part({"x": torch.ones(1)}, version=Version(0, 1), attempt=attempt, rank=0, ranks=2)
    with pytest.raises(PartsMissing, match="rank"):
        checkpoints.commit_parts(Version(0, 1), attempt, 2, documents={})
    assert checkpoints.versions() == []
