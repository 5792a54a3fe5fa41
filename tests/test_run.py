"""A run's folder: made once, found by name or as the newest, gone on with only as the same experiment."""

import json
import os
import re
import uuid
from pathlib import Path

import pytest

from rollart import run
from rollart.config import Config, ConfigError, parse
from rollart.journal import Journal, Opened, Trained
from rollart.lease import RunHeld
from rollart.processes import this_process
from rollart.run import RunDamaged, RunExists, RunFolder, RunMissing
from rollart.tenure import Tenure
from storage.objects.store import ObjectStore

QUICKSTART = (Path(__file__).parent.parent / "flows" / "configs" / "quickstart.yaml").read_text()


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where runs lie, on each kind of store."""
    return str(tmp_path / "runs") if request.param == "local" else f"memory://{uuid.uuid4().hex}/runs"


def configured(root: str, *overrides: str) -> Config:
    return parse(QUICKSTART, [f"run.root={root}", *overrides])


def created(folder: RunFolder, when: float) -> None:
    """Makes the run one that was started at `when`: names sort otherwise."""
    about = json.loads(folder.store.read("run.json"))
    folder.store.write("run.json", json.dumps({**about, "created": when}).encode())


def test_a_new_run_stands_in_its_folder_with_the_configuration_that_it_reads_back(root: str) -> None:
    config = configured(root, "run.name=first", "train.steps=7")
    folder = RunFolder.create(config, "train")
    assert folder.name == "first" and folder.child("weights") == f"{folder.url}/weights"
    assert RunFolder(folder.url).config() == config
    assert run.about(root, "first")["flow"] == "train"
    assert run.about(root, "first")["state"] == "0 steps, stopped"


def test_a_run_without_a_name_is_called_by_its_flow_and_the_time_and_keeps_that_name(root: str) -> None:
    folder = RunFolder.create(configured(root), "sft")
    assert folder.name.startswith("sft-20") and folder.config().run.name == folder.name
    assert run.names(root) == [folder.name]


def test_a_name_that_is_taken_is_refused_and_the_run_there_stays(root: str) -> None:
    first = RunFolder.create(configured(root, "run.name=same", "train.steps=7"), "train")
    with pytest.raises(RunExists, match=r"run.name: .*same holds a run already; go on with --resume"):
        RunFolder.create(configured(root, "run.name=same", "train.steps=9"), "train")
    assert first.config().train.steps == 7


def test_a_root_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(Exception, match="file") as refused:
        RunFolder.create(configured(str(tmp_path / "file"), "run.name=a"), "train")
    assert type(refused.value).__module__ == "storage.errors"


def test_resuming_finds_the_run_by_name_and_else_the_newest(root: str) -> None:
    for name, when in (("b", 10.0), ("a", 30.0), ("c", 20.0)):
        created(RunFolder.create(configured(root, f"run.name={name}"), "train"), when)
    assert run.names(root) == ["b", "c", "a"] and run.newest(root) == "a"
    assert RunFolder.resume(configured(root)).name == "a"
    assert RunFolder.resume(configured(root, "run.name=c")).name == "c"


def test_resuming_what_is_not_there_says_so(root: str) -> None:
    assert run.names(root) == [] and run.newest(root) is None
    with pytest.raises(RunMissing, match=r"--resume: .*runs holds no run; start one without --resume"):
        RunFolder.resume(configured(root))
    with pytest.raises(RunMissing, match=r"gone holds no run \(no config.yaml\)"):
        RunFolder.resume(configured(root, "run.name=gone"))


def test_a_resumed_run_may_get_more_steps_and_goes_on_with_them(root: str) -> None:
    RunFolder.create(configured(root, "run.name=r", "train.steps=7"), "train")
    longer = configured(root, "run.name=r", "train.steps=9", "evaluate.every=2", "run.dashboard_port=0")
    folder = RunFolder.resume(longer)
    assert folder.config().train.steps == 7  # nothing is stored before the run can start
    folder.keep(longer.model_copy(update={"run": longer.run.model_copy(update={"name": None})}))
    assert folder.config() == longer


def test_a_resumed_run_may_not_become_another_experiment(root: str) -> None:
    RunFolder.create(configured(root, "run.name=r"), "train")
    with pytest.raises(
        ConfigError, match=r"^run.seed, train.alpha: may not change on --resume of .*what may change: evaluate, hardware, "
    ) as refused:
        RunFolder.resume(configured(root, "run.name=r", "run.seed=8", "train.alpha=3", "train.steps=9"))
    assert "train.steps," not in str(refused.value).partition("(what may change")[0]


def test_a_damaged_configuration_in_a_run_is_named(root: str) -> None:
    folder = RunFolder.create(configured(root, "run.name=r"), "train")
    folder.store.write("config.yaml", b"run: [")
    with pytest.raises(ConfigError, match=r"r/config.yaml: line 1"):
        folder.config()


def test_a_run_that_another_process_runs_is_refused_by_either_way_of_starting_it(root: str) -> None:
    folder = RunFolder.create(configured(root, "run.name=r"), "train")
    Tenure.take(folder.store, 60.0)
    said = rf"^{re.escape(folder.url)} is run by process {os.getpid()} on .* \(coordinator 0, last heard of 0 s ago\): stop it first"
    with pytest.raises(RunHeld, match=said):
        RunFolder.resume(configured(root, "run.name=r"))
    with pytest.raises(RunHeld, match=said):
        RunFolder.create(configured(root, "run.name=r"), "train")


def test_a_run_counts_as_begun_once_a_second_coordinator_has_taken_it_over(root: str) -> None:
    folder = RunFolder.create(configured(root, "run.name=r"), "train")
    Tenure.take(folder.store, 60.0).release()
    assert not folder.began()
    Tenure.take(folder.store, 60.0)
    assert folder.began()
    folder.discard()
    assert folder.store.list() == []


def test_only_folders_of_runs_are_listed(root: str) -> None:
    RunFolder.create(configured(root, "run.name=r"), "train")
    store = ObjectStore(root)
    store.write("notes.txt", b"x")
    store.write("other/deep/run.json", b"{}")
    journal = Journal(store.child("r"))
    for number, step in enumerate([0, 1, 2, 1]):  # the last went back to where the third had begun
        journal.append(number, Trained(0, number // 3, step, 0.0, ()))
    journal.append(4, Opened(this_process(), 0.0))
    assert run.names(root) == ["r"] and run.about(root, "r")["state"] == "2 steps, stopped"
    store.write("r/report.html", b"")
    assert run.about(root, "r")["state"] == "2 steps, reported"
    tenure = Tenure.take(store.child("r"), 60.0)
    assert run.about(root, "r")["state"] == "2 steps, running"
    tenure.release()
    assert run.about(root, "r")["state"] == "2 steps, reported"


def test_a_run_whose_own_files_are_spoilt_is_named(root: str) -> None:
    folder = RunFolder.create(configured(root, "run.name=spoilt"), "train")
    for spoilt in (b"[]", b"{", b'{"flow": "train", "created": 1e300}', b"\xff"):
        folder.store.write("run.json", spoilt)
        with pytest.raises(RunDamaged, match=r"spoilt/run.json is not what a run writes there; remove that folder"):
            run.names(root)
    folder.store.write("config.yaml", b"\xff\xfe")
    with pytest.raises(RunDamaged, match=r"spoilt/config.yaml is no UTF-8 text"):
        folder.config()


def test_a_run_whose_ledger_is_damaged_is_listed_as_such(root: str) -> None:
    folder = RunFolder.create(configured(root, "run.name=r"), "train")
    folder.store.write("ledger/00000000.json", b"nothing of a run's")
    assert run.names(root) == ["r"]
    found = run.about(root, "r")
    assert found["steps"] is None and found["state"].startswith("damaged: ") and "ledger/00000000.json" in found["state"]
