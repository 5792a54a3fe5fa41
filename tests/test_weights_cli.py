"""`rollart weights`: what each command prints, as JSON too, its exit codes, and that no secret is echoed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from moto.server import ThreadedMotoServer
from safetensors.torch import load_file, save_file

from rollart.cli import main
from storage.models.adapters import Adapter, publish_base
from storage.version import Version
from storage.weights import WeightStore

FILES = {"config.json": b'{"model_type": "x"}', "tokenizer.json": b"{}"}
SECRET = "hunter2-very-secret"


def rollart(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["weights", *map(str, arguments)])


def said(*arguments: object, code: int = 0) -> dict[str, Any]:
    """The one JSON object that is all of stdout."""
    done = rollart(*arguments, "--json")
    assert done.exit_code == code, (done.output, done.exception)
    (line,) = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(line)
    assert found["ok"] == (code == 0)
    return found


def one_line(done: Result, code: int = 2) -> str:
    assert done.exit_code == code, (done.output, done.exception)
    (line,) = done.stderr.splitlines()
    assert line.startswith("rollart: ")
    return line


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    """Versions 0-0, 0-1 and 0-2 whose tensor `w` [4] is full of their step; `best` is 0-1."""
    store = WeightStore(str(tmp_path / "weights"))
    for step in range(3):
        metadata = {"flow": "train"} if step else {}
        store.publish({"w": torch.full((4,), float(step)), "n": torch.tensor(7)}, version=Version(0, step), metadata=metadata, files=FILES).result()
    store.tag("best", Version(0, 1))
    return store


def test_ls_lists_every_version_with_what_it_is(store: WeightStore) -> None:
    found = said("ls", store.url)
    assert found["url"] == store.url
    assert [(v["version"], v["newest"], v["tags"], v["kind"]) for v in found["versions"]] == [
        ("0-0", False, [], "full"), ("0-1", False, ["best"], "full"), ("0-2", True, [], "full")
    ]  # fmt: skip
    assert [v["bytes"] for v in found["versions"]] == [store.commit(v).bytes for v in store.versions()]
    text = rollart("ls", store.url).stdout.splitlines()
    assert len(text) == 3 and text[1].strip().startswith("0-1") and text[1].endswith("best") and text[2].endswith("newest")


def test_ls_of_an_empty_store_and_of_one_with_a_damaged_commit_still_lists(store: WeightStore, tmp_path: Path) -> None:
    assert said("ls", tmp_path / "nothing")["versions"] == []
    assert "no versions in" in rollart("ls", tmp_path / "nothing").stdout
    store.objects.write("commits/0-00000001.json", b"{}")
    errors = [v.get("error", "") for v in said("ls", store.url)["versions"]]
    assert errors[0] == errors[2] == "" and "damaged" in errors[1]


@pytest.mark.parametrize(("ref", "version"), [("", "0-2"), ("@newest", "0-2"), ("@best", "0-1"), ("@0-0", "0-0")])
def test_show_tells_of_the_version_that_the_location_names(store: WeightStore, ref: str, version: str) -> None:
    found = said("show", store.url + ref)
    assert found["version"] == version and found["files"] == {"config.json": 19, "tokenizer.json": 2}
    assert found["tensors"] == {"w": {"dtype": "float32", "shape": [4]}, "n": {"dtype": "int64", "shape": []}}
    assert found["metadata"] == ({} if version == "0-0" else {"flow": "train"})
    assert f"{store.url}@{version}: full" in rollart("show", store.url + ref).stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("show", "{url}@0-9"), "doesn't hold version 0-9"),
        (("show", "{url}@worst"), "has no tag 'worst'"),
        (("show", "{url}@no/such"), "doesn't hold any version"),
        (("show", "{url}@"), "can't be a tag"),
        (("ls", "{url}@0-1"), "leave out @0-1"),
        (("ls", "ftp:/" + "/nowhere.invalid/x"), "ftp"),
        (("tag", "{url}@0-9", "x"), "doesn't hold version 0-9"),
        (("tag", "{url}", "0-1"), "can't be a tag"),
        (("untag", "{url}", "worst"), "has no tag 'worst'"),
        (("verify", "{url}@0-9"), "doesn't hold version 0-9"),
        (("verify", "{url}/mistyped"), "nothing was verified"),
        (("gc", "{url}"), "say what to keep"),
        (("gc", "{url}", "--keep-last", "1", "--grace", "nan"), "--grace is no number"),
        (("gc", "", "--keep-last", "1"), "names no store"),
        (("export", "{url}", "{url}2", "--shard-gb", "inf"), "--shard-gb is no size"),
        (("import", "{url}", "{url}"), "has neither model.safetensors nor"),
        (("import", "{url}/none", "{url}"), "can't be listed as a folder"),
        (("import", "{url}", "{url}", "--as", "one"), "--as: 'one' is no version"),
        (("export", "{url}", "{url}"), "give a folder that is empty or new"),
        (("export", "{url}", "{url}", "--weights-only", "--files", "x"), "contradict each other"),
        (("diff", "{url}", "@0-9"), "doesn't hold version 0-9"),
        (("copy", "{url}@0-1", "{url}2", "--all"), "leave out @VERSION"),
        (("ls", "{url}", "--options", "[1]"), "--options is no JSON object"),
        (("ls", "{url}", "--options", "[" * 99999), "--options is no JSON object"),
        (("ls", "{url}", "--option", "key"), "--option number 1 has no '='"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_as_text_and_as_json(store: WeightStore, arguments: tuple[str, ...], says: str) -> None:
    filled = [argument.replace("{url}", store.url) for argument in arguments]
    done = rollart(*filled)
    assert says in one_line(done) and done.stdout == ""
    found = said(*filled, code=2)
    assert says in found["error"] and found["exit_code"] == 2


def test_a_tag_is_put_moved_and_taken_away(store: WeightStore) -> None:
    assert said("tag", store.url + "@0-0", "start") == {"ok": True, "url": store.url, "tag": "start", "version": "0-0"}
    assert "start is version 0-2" in rollart("tag", store.url, "start").stdout
    assert store.tags() == {"best": Version(0, 1), "start": Version(0, 2)}
    said("untag", store.url, "start")
    assert store.tags() == {"best": Version(0, 1)}


def test_verify_ends_in_0_for_a_sound_store_and_in_3_for_a_damaged_one(store: WeightStore) -> None:
    found = said("verify", store.url)
    assert found["versions"] == ["0-0", "0-1", "0-2"] and found["damages"] == [] and found["bytes"] > 0
    assert "all as it was written" in rollart("verify", store.url).stdout
    (chunk,) = [p for p in store.objects.list() if p.startswith("data/v0-00000001") and p.endswith("float32/c/0")]
    store.objects.write(chunk, store.objects.read(chunk)[::-1])
    done = rollart("verify", store.url)
    assert "1 objects are damaged" in one_line(done, code=3) and chunk in done.stdout and "lost with it: w" in done.stdout
    (damage,) = said("verify", store.url, code=3)["damages"]
    assert (damage["path"], damage["version"], damage["tensors"]) == (chunk, "0-1", ["w"])
    assert said("verify", store.url + "@0-2")["versions"] == ["0-2"]


def test_export_and_import_go_through_a_folder(store: WeightStore, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = said("export", store.url + "@best", out)
    assert found["files"] == ["config.json", "model.safetensors", "tokenizer.json"] and found["folder"] == str(out)
    assert torch.equal(load_file(out / "model.safetensors")["w"], torch.full((4,), 1.0))
    assert "give a folder that is empty" in one_line(rollart("export", store.url, out))
    assert "version 0-2" in rollart("export", store.url, out, "--force").stdout
    assert torch.equal(load_file(out / "model.safetensors")["w"], torch.full((4,), 2.0))
    found = said("import", out, store.url, "--tag", "back")
    assert found["version"] == "1-0" and store.tags()["back"] == Version(1, 0)
    assert said("import", out, store.url, "--as", "1-5")["version"] == "1-5"
    assert "exists already" in said("import", out, store.url, "--as", "1-5", code=2)["error"]


def test_an_import_whose_tag_cannot_be_publishes_nothing(store: WeightStore, tmp_path: Path) -> None:
    said("export", store.url, tmp_path / "model")
    assert "can't be a tag" in said("import", tmp_path / "model", tmp_path / "other", "--tag", "newest", code=2)["error"]
    assert not (tmp_path / "other").exists()


def test_export_takes_the_files_of_a_folder_or_none_and_splits_what_is_large(store: WeightStore, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"mine": 1}')
    said("export", store.url, tmp_path / "a", "--files", tmp_path / "model")
    assert (tmp_path / "a" / "config.json").read_text() == '{"mine": 1}' and not (tmp_path / "a" / "tokenizer.json").exists()
    names = said("export", store.url, tmp_path / "b", "--weights-only", "--shard-gb", "1e-8")["files"]
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]


def test_diff_measures_and_names_what_differs(store: WeightStore, tmp_path: Path) -> None:
    found = said("diff", store.url + "@0-1", "@0-2")
    assert found["before"] == f"{store.url}@0-1" and found["after"] == f"{store.url}@0-2"
    (n, w) = sorted(found["tensors"], key=lambda t: t["name"])
    assert (n["kind"], w["kind"], w["changed_share"], w["max_abs"], w["relative_l2"]) == ("same", "changed", 1.0, 1.0, 1.0)
    assert (found["all"]["values"], found["all"]["changed"]) == (5, 4)
    other = WeightStore(str(tmp_path / "other"))
    other.publish({"w": torch.full((5,), float("nan")), "new": torch.ones(1)}, version=Version(0, 0)).result()
    text = rollart("diff", store.url, other.url, "--tensors").stdout
    assert "reshaped w: float32 [4] -> float32 [5]" in text and "added new: nothing -> float32 [1]" in text and "3 differ" in text
    other.publish({"w": torch.full((4,), float("nan"))}, version=Version(0, 1)).result()
    assert said("diff", store.url, other.url)["all"]["max_abs"] == "nan"


def test_gc_shows_what_would_go_then_removes_it_and_keeps_what_is_named(store: WeightStore) -> None:
    before = store.objects.list()
    found = said("gc", store.url, "--keep-last", 1, "--dry-run")
    assert found["retired"] == ["0-0"] and set(found["kept"]) == {"0-1", "0-2"} and found["dry_run"] is True
    assert found["kept"]["0-1"] == ["tag best"]
    assert store.objects.list() == before
    text = rollart("gc", store.url, "--keep-last", 1, "--dry-run").stdout
    assert "0-0  would go now" in text and "0-1  stays: tag best" in text
    assert said("gc", store.url, "--keep-last", 1, "--grace", 0)["retired"] == ["0-0"]
    assert store.versions() == [Version(0, 1), Version(0, 2)]
    assert said("gc", store.url, "--window", 5, "--grace", 0)["deleted"] == ["0-0"]
    assert not any(path.startswith("data/v0-00000000") for path in store.objects.list())
    assert store.verify().sound


def test_copy_takes_one_version_or_all_with_tags(store: WeightStore, tmp_path: Path) -> None:
    one, whole = tmp_path / "one", tmp_path / "all"
    assert said("copy", store.url + "@best", one) == {"ok": True, "from": store.url, "to": str(one), "versions": ["0-1"], "tags": {}}
    assert said("copy", store.url, whole, "--all", "--tags")["versions"] == ["0-0", "0-1", "0-2"]
    copied = WeightStore(str(whole))
    assert copied.tags() == {"best": Version(0, 1)} and torch.equal(copied.pull()["w"], torch.full((4,), 2.0))
    assert "holds 0-0, 0-1, 0-2" in rollart("copy", store.url, whole, "--all").stdout
    assert said("copy", store.url, one, "--full")["versions"] == ["0-2"]
    different = WeightStore(str(tmp_path / "different"))
    different.publish({"w": torch.ones(1)}, version=Version(0, 2)).result()
    assert "another version 0-2" in one_line(rollart("copy", store.url, different.url))


def test_a_bucket_is_used_with_options_of_which_no_value_is_ever_shown(store: WeightStore, tmp_path: Path) -> None:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        nested = json.dumps({"endpoint_url": f"http://{host}:{port}"})
        options = ("--option", "key=some-key-id", "--option", f"secret={SECRET}", "--options", nested)
        import fsspec

        fsspec.filesystem("s3", key="some-key-id", secret=SECRET, **json.loads(nested)).mkdir("box")
        to_options = ("--to-option", "key=some-key-id", "--to-option", f"secret={SECRET}", "--to-options", nested)
        heard = [
            rollart("copy", store.url, "s3://box/w", "--all", *to_options, "--json"),
            rollart("ls", "s3://box/w", *options, "--json"),
            rollart("copy", "s3://box/w@0-1", "s3://box/other", *options, "--json"),
            rollart("export", "s3://box/w", tmp_path / "out", *options),
        ]
        assert [done.exit_code for done in heard] == [0] * 4, [done.output for done in heard]
        assert [v["version"] for v in json.loads(heard[1].stdout)["versions"]] == ["0-0", "0-1", "0-2"]
        heard += [
            rollart("ls", "s3://no-such-box/w", *options),
            rollart("ls", "s3://box/w", *options, "--option", SECRET),
            rollart("ls", "s3://box/w", *options[:-1], f'["{SECRET}"'),
            rollart("copy", "s3://box/w@0-9", "s3://box/w2", *options),
        ]
        assert [done.exit_code for done in heard[4:]] == [2] * 4
        assert not any(SECRET in done.output for done in heard)
    finally:
        server.stop()


def test_text_from_a_store_cannot_drive_the_terminal(tmp_path: Path) -> None:
    save_file({"w\x1b[2J": torch.ones(1)}, tmp_path / "model.safetensors")
    store = WeightStore(str(tmp_path / "weights"))
    rollart("import", tmp_path, store.url)
    assert "\x1b" not in rollart("show", store.url).stdout and "w\\x1b[2J" in rollart("show", store.url).stdout


def test_it_is_reachable_as_a_dask_command_and_shows_no_bar_where_there_is_no_terminal(store: WeightStore) -> None:
    command = [sys.executable, "-m", "dask", "rollart", "weights", "verify", store.url, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0 and json.loads(done.stdout)["ok"] is True and done.stderr == ""


def test_an_adapter_is_listed_checked_copied_and_exported_alone_or_merged(tmp_path: Path) -> None:
    store = WeightStore(str(tmp_path / "adapters"))
    base = {"layer.weight": torch.arange(6.0).view(2, 3), "norm.weight": torch.ones(2)}
    a, b = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5], [-1.0]])
    digest = publish_base(store, base, FILES)
    changes = {f"base_model.model.layer.lora_{which}.weight": value for which, value in (("A", a), ("B", b))}
    files = {**FILES, "adapter_config.json": b'{"r": 1}'}
    store.publish(changes, version=Version(0, 0), metadata=Adapter(1, 4.0, ["layer"], False, digest).document(), files=files).result()

    assert [v["kind"] for v in said("ls", store.url)["versions"]] == ["adapter"]
    assert said("show", store.url)["metadata"]["adapter"]["base"] == digest
    checked = said("verify", store.url)
    assert checked["damages"] == [] and checked["bytes"] > said("show", store.url)["bytes"] + sum(v.nbytes for v in base.values())

    copied = str(tmp_path / "copied")
    said("copy", store.url, copied)
    alone = said("export", copied, tmp_path / "alone")
    assert alone["files"] == ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"]
    found = load_file(tmp_path / "alone" / "adapter_model.safetensors")
    assert found.keys() == changes.keys() and all(torch.equal(found[name], value) for name, value in changes.items())
    assert json.loads((tmp_path / "alone" / "adapter_config.json").read_text())["base_model_name_or_path"] == f"{copied}/bases/{digest}@0-0"

    assert said("export", copied, tmp_path / "whole", "--merged")["files"] == ["config.json", "model.safetensors", "tokenizer.json"]
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert torch.equal(whole["layer.weight"], base["layer.weight"] + 4.0 * b @ a) and torch.equal(whole["norm.weight"], base["norm.weight"])
    said("export", f"{copied}/bases/{digest}", tmp_path / "base")
    assert torch.equal(load_file(tmp_path / "base" / "model.safetensors")["layer.weight"], base["layer.weight"])

    shutil.rmtree(tmp_path / "copied" / "bases")
    assert [d["reason"] for d in said("verify", copied, code=3)["damages"]] == ["is missing, the base of an adapter"]
    assert "base of an adapter" in one_line(rollart("export", copied, tmp_path / "none", "--merged"), code=2)
