"""Writes a version as the folder of a Hugging Face model, and publishes such a folder as a version; owns what goes into each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from storage.errors import FolderRefused
from storage.format.commit import JSON, Commit
from storage.format.dtypes import ITEMSIZE
from storage.models import folders
from storage.models.adapters import BASE, CONFIG_FILE, Whole, adapter_of, base_of, config_with_base
from storage.models.safetensors_files import INDEX, TIED, check_writable_type, index_of, is_weights, parts, shard_names, shards, tensors_of
from storage.objects.store import ObjectStore
from storage.progress import Progress, Tally
from storage.version import Version
from storage.weights import WeightStore

SHARD_BYTES = 4 << 30
"""What one file holds at most, and so about what an export needs in memory."""

CONFIG = "config.json"

_OF_MODELS = (CONFIG, "generation_config.json")

ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""Where peft saves an adapter's tensors."""


def export_folder(
    store: WeightStore, version: Version | None, target: str | ObjectStore, *, storage_options: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None, shard_bytes: int = SHARD_BYTES, force: bool = False, progress: Progress | None = None,
) -> list[str]:  # fmt: skip
    """Writes `version` (None: the newest) into `target`, as transformers' `from_pretrained` reads it; the files' names.

    `target` is a folder, a URL that `storage_options` open, or a store that is open. `files` (name -> content: config, tokenizer)
    stand in for those of the version, of which only a config and a tokenizer are written; an empty mapping writes weights alone.
    An adapter is added into its base. There is one file of weights per `shard_bytes`, each in memory alone. `config.json` comes last
    and, with `force`, which replaces a model that is there, goes first: a folder that a crash left half can't be loaded.

    FolderRefused if `target` holds anything and `force` isn't given, or if there is no `config.json` to write; UnsupportedTensor for
    what safetensors can't hold; what `pull` raises.
    """
    whole = Whole(store, version if version is not None else store.resolve(None))
    commit = whole.commit
    version = commit.version
    asked = files is None or files
    files = {name: store.file(version, name) for name in commit.files if folders.is_model_file(name)} if files is None else files
    if asked and CONFIG not in files:
        raise FolderRefused(f"no {CONFIG} for version {version} of {store.url}: give the files of the model's folder, or write weights alone")
    if weights := [name for name in files if is_weights(name)]:
        raise FolderRefused(f"{weights[0]} can't be among the files of a model's folder: it is where weights go")
    for name, tensor in whole.tensors.items():
        check_writable_type(name, tensor.dtype)
    folder = target if isinstance(target, ObjectStore) else ObjectStore(target, storage_options, durable=True)
    _clear(folder, force)
    left_out = _tied_by_transformers(whole.layout, files.get(CONFIG))
    sizes = {name: tensor.numel * ITEMSIZE[tensor.dtype] for name, tensor in whole.tensors.items() if name not in left_out}
    groups = shards(sizes, shard_bytes)
    placed = dict(zip(shard_names(len(groups)), groups, strict=True))
    tied = {TIED: json.dumps(ties)} if (ties := _ties(whole.layout, left_out)) else {}
    for name in sorted(files.keys() - {CONFIG}):
        folder.write(name, files[name])
    tally = Tally(sum(sizes.values()), progress)
    for number, (file, names) in enumerate(placed.items()):
        folder.write(file, parts(whole.pull(names), {} if number else tied))
        tally.add(sum(sizes[name] for name in names))
    if len(placed) > 1:
        folder.write(INDEX, index_of(placed, sizes))
    if CONFIG in files:
        folder.write(CONFIG, files[CONFIG])
    return sorted({*files, *placed, *([INDEX] if len(placed) > 1 else [])})


def export_adapter(
    store: WeightStore, version: Version, target: str | ObjectStore, *, storage_options: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None, force: bool = False,
) -> list[str]:  # fmt: skip
    """Writes `version`, an adapter, into `target`, as peft's `PeftModel.from_pretrained` reads it; the files' names.

    Beside the adapter the tokenizer is written, from `files` if given, else of the version, but no `config.json`, which would make the
    folder a model. peft's configuration comes last and names the base as this project does, `URL@VERSION`: load that into the model that
    peft is given. FolderRefused if the version is no adapter, and as `export_folder`; what `pull` raises.
    """
    commit = store.commit(version)
    adapter = adapter_of(commit, store.url)
    if adapter is None:
        raise FolderRefused(f"version {version} of {store.url} is whole weights, no adapter: export it as a model")
    config = config_with_base(store.file(version, CONFIG_FILE), f"{base_of(store, adapter.base).url}@{BASE}")
    given = {name: store.file(version, name) for name in commit.files} if files is None else files
    written = {name: data for name, data in given.items() if folders.is_model_file(name) and name not in _OF_MODELS}
    folder = target if isinstance(target, ObjectStore) else ObjectStore(target, storage_options, durable=True)
    _clear(folder, force)
    for name in sorted(written):
        folder.write(name, written[name])
    folder.write(ADAPTER_WEIGHTS, parts(store.pull(version), {}))
    folder.write(CONFIG_FILE, config)
    return sorted({*written, ADAPTER_WEIGHTS, CONFIG_FILE})


def import_folder(
    store: WeightStore, folder: str, *, version: Version | None = None, storage_options: Mapping[str, Any] | None = None,
    metadata: Mapping[str, JSON] | None = None,
) -> Version:  # fmt: skip
    """Publishes the model in the folder or URL `folder`, with its config and tokenizer, as `version`; returns once it exists.

    Default: step 0 of lineage 0 in an empty store; else step 0 of a new lineage, since a version's step counts training steps
    from where its lineage began. The newest version is then the imported one, and no run's. FolderRefused if the folder is no model
    in safetensors, contradicts itself or leads out of itself; VersionTaken; UnsupportedTensor. Nothing is unpickled.
    """
    with folders.fetched(folder, storage_options, lambda name: is_weights(name) or folders.is_model_file(name)) as local, ExitStack() as stack:
        state = tensors_of(local, folders.present(local), stack)
        files = folders.model_files(local)
        # The lineage branches off the newest version, so that this stays the newest until the import is there.
        newest = store.newest() if version is None else None
        if version is None:
            version = Version(0, 0) if newest is None else Version(store.open_lineage(newest), 0)
        said = {"imported": ObjectStore(folder, storage_options).url, **(metadata or {})}
        return store.publish(state, version=version, metadata=said, files=files, background=False).result()


def _clear(folder: ObjectStore, force: bool) -> None:
    """Makes room for a model; FolderRefused if there are files and `force` isn't given."""
    there = folder.list()
    if there and not force:
        raise FolderRefused(f"{folder.url} holds {there[0]} already: give a folder that is empty or new, or force it to replace the model there")
    stale = [name for name in there if is_weights(name) or folders.is_model_file(name) or name in (CONFIG_FILE, ADAPTER_WEIGHTS)]
    for name in sorted(stale, key=lambda name: (name not in (CONFIG, CONFIG_FILE), name != INDEX, name)):
        folder.delete(name)


def _ties(commit: Commit, left_out: Mapping[str, str]) -> dict[str, str]:
    """Each other name of a tensor -> the name whose values are written, whether or not this one's are too."""
    owner_of = {name: tensor.alias_of for name, tensor in commit.tensors.items() if tensor.alias_of is not None}
    kept = {owner: owner for owner in owner_of.values()}
    for name in (*kept, *owner_of):
        owner = owner_of.get(name, name)
        if kept[owner] in left_out and name not in left_out:
            kept[owner] = name
    return {name: kept[owner] for name, owner in ((*owner_of.items(), *((o, o) for o in kept))) if name != kept[owner]}


def _tied_by_transformers(commit: Commit, config: bytes | None) -> dict[str, str]:
    """Names to leave out, and the name that transformers ties each to when it loads a model of this `config.json`.

    Tensors that are tied in the version but not by transformers have to stand in the files under each of their names: only
    transformers itself knows which these are, and it is asked only if any are tied.
    """
    owner_of = {name: tensor.alias_of or name for name, tensor in commit.tensors.items()}
    if config is None or not any(tensor.alias_of for tensor in commit.tensors.values()):
        return {}
    ties = _ties_of_model(config)
    return {name: to for name, to in ties.items() if name in owner_of and to in owner_of and to not in ties and owner_of[name] == owner_of[to]}


def _ties_of_model(config: bytes) -> dict[str, str]:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        said = dict(json.loads(config))
        made = AutoConfig.for_model(said.pop("model_type", None), **said)
        with torch.device("meta"):  # no memory, no values
            model: Any = AutoModelForCausalLM.from_config(made)
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, ArithmeticError, RuntimeError, StrictDataclassError):
        return {}  # a model that transformers can't build it won't tie either
    return dict(model.all_tied_weights_keys)
