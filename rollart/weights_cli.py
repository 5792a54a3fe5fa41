"""`rollart weights ...`: versions of weights on any store, listed, checked, named, exported, compared, copied; each a thin function.

LOCATION is `URL` (its newest version) or `URL@REF`, REF a version (`0-42`), a tag, or `newest`.
"""

from __future__ import annotations

import json
import math
from typing import Any

import click

from rollart.command import FAILED, USER_ERROR, clean_errors, fail, json_option
from rollart.config import ConfigError
from rollart.weights_locations import (
    both_options,
    located,
    open_store,
    parsed_options,
    parsed_version,
    split_location,
    store_options,
    two_stores_options,
)
from rollart.weights_view import about, difference, measured, measures, plain, print_json, progress_bar, say, size, when


@click.group()
def weights() -> None:
    """Versions of a model's weights: list, check, name, export, import, compare, collect, copy.

    LOCATION is URL or URL@REF, where REF is a version such as 0-42, a tag, or newest (the default).
    """


@weights.command("ls")
@click.argument("url", metavar="URL")
@store_options
@json_option
@clean_errors()
def list_versions(url: str, pairs: tuple[str, ...], text: str | None, as_json: bool) -> None:
    """Lists the versions of a store."""
    from storage.errors import Damaged, UnknownFormat

    store = open_store(url, parsed_options(pairs, text))
    tags, newest = store.tags(), store.newest()
    rows: list[dict[str, Any]] = []
    for version in store.versions():
        row: dict[str, Any] = {"version": str(version), "newest": version == newest, "tags": [n for n, v in tags.items() if v == version]}
        try:
            rows.append({**row, **about(store.commit(version))})
        except (Damaged, UnknownFormat) as error:
            rows.append({**row, "error": str(error)})
    if as_json:
        print_json({"url": store.url, "versions": rows})
        return
    if not rows:
        click.echo(f"no versions in {store.url}")
    for row in rows:
        said = row.get("error") or f"{when(row['created'])}  {size(row['bytes']):>9}  {row['kind']:16}"
        names = [*(["newest"] if row["newest"] else []), *row["tags"]]
        click.echo(f"{row['version']:>10}  {said}  {', '.join(names)}".rstrip())


@weights.command()
@click.argument("location")
@store_options
@json_option
@clean_errors()
def show(location: str, pairs: tuple[str, ...], text: str | None, as_json: bool) -> None:
    """Shows what one version holds and where it came from."""
    store, version = located(location, parsed_options(pairs, text))
    commit = store.commit(version)
    tensors = {
        name: {"dtype": t.dtype, "shape": list(t.shape), **({"tied_to": t.alias_of} if t.alias_of else {})} for name, t in commit.tensors.items()
    }
    files = {name: entry.bytes for name, entry in commit.files.items()}
    tags = [name for name, tagged in store.tags().items() if tagged == version]
    if as_json:
        named = {"url": store.url, "version": str(version), "tags": tags}
        print_json({**named, **about(commit), "metadata": commit.metadata, "files": files, "tensors": tensors})
        return
    found = about(commit)
    click.echo(f"{store.url}@{version}: {found['kind']}, {size(found['bytes'])} stored, {when(found['created'])}")
    for name, value in (("parent", found["parent"]), ("tags", ", ".join(tags)), ("files", ", ".join(files))):
        if value:
            click.echo(f"{name}: {value}")
    if commit.metadata:
        click.echo(f"metadata: {json.dumps(commit.metadata)}")
    for name, tensor in tensors.items():
        tied = f"  (tied to {plain(str(tensor['tied_to']))})" if "tied_to" in tensor else ""
        click.echo(f"  {plain(name)}  {tensor['dtype']}  {tensor['shape']}{tied}")


@weights.command()
@click.argument("location")
@click.argument("name")
@store_options
@json_option
@clean_errors()
def tag(location: str, name: str, pairs: tuple[str, ...], text: str | None, as_json: bool) -> None:
    """Puts the tag NAME on a version, taking it off any other."""
    store, version = located(location, parsed_options(pairs, text))
    store.tag(name, version)
    say(as_json, f"{name} is version {version} of {store.url}", {"url": store.url, "tag": name, "version": str(version)})


@weights.command()
@click.argument("url", metavar="URL")
@click.argument("name")
@store_options
@json_option
@clean_errors()
def untag(url: str, name: str, pairs: tuple[str, ...], text: str | None, as_json: bool) -> None:
    """Takes the tag NAME away; the version stays until it is collected."""
    store = open_store(url, parsed_options(pairs, text))
    store.untag(name)
    say(as_json, f"{store.url} has no tag {name} any more", {"url": store.url, "tag": name})


@weights.command()
@click.argument("location")
@store_options
@json_option
@clean_errors()
def verify(location: str, pairs: tuple[str, ...], text: str | None, as_json: bool) -> None:
    """Reads all of a store, or of one version and what it needs, and checks every byte; exit code 3 if any is damaged."""
    from storage.models.adapters import verify_with_bases

    url, ref = split_location(location)
    store = open_store(url, parsed_options(pairs, text))
    with progress_bar(f"verifying {store.url}") as told:
        found = verify_with_bases(store, ref, told)
    damages = [
        {"path": d.path, "reason": d.reason, "version": None if d.version is None else str(d.version), "tensors": list(d.tensors)}
        for d in found.damages
    ]
    named = {"url": store.url, "versions": [str(v) for v in found.versions], "bytes": found.bytes, "orphans": len(found.orphans)}
    line = f"{store.url}: {len(found.versions)} versions, {size(found.bytes)} read"
    if not found.versions and found.sound:
        fail(f"no versions in {store.url}, so nothing was verified: is the address right?", USER_ERROR, as_json)
    if found.sound:
        say(as_json, f"{line}, all as it was written", {**named, "damages": damages})
        return
    if not as_json:
        for d in damages:
            lost = f"; lost with it: {plain(', '.join(d['tensors']))}" if d["tensors"] else ""
            click.echo(f"{d['path']} {d['reason']} (version {d['version'] or '-'}{lost})")
    fail(f"{line}, {len(damages)} objects are damaged", FAILED, as_json, {**named, "damages": damages})


@weights.command()
@click.argument("url", metavar="URL")
@click.option("--keep-last", type=click.IntRange(min=1), help="Keep so many of the last versions.")
@click.option("--keep-every", type=click.IntRange(min=1), help="Keep versions whose step is a multiple of this.")
@click.option("--window", type=click.IntRange(min=0), help="Keep versions at most so many steps older than the newest.")
@click.option("--grace", type=click.FloatRange(min=0), default=3600.0, show_default=True, help="Seconds that the data of a version stays after it.")
@click.option("--dry-run", is_flag=True, help="Show what would go, and remove nothing.")
@store_options
@json_option
@clean_errors()
def gc(
    url: str, keep_last: int | None, keep_every: int | None, window: int | None, grace: float, dry_run: bool, pairs: tuple[str, ...],
    text: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Removes versions that nothing keeps, and what dead publishers left; tags and leases keep, and what a kept version needs stays."""
    from storage.keeping.retention import Retention

    if keep_last is keep_every is window is None:
        raise ConfigError("say what to keep: --keep-last, --keep-every or --window (the newest version, tags and leases are always kept)")
    if math.isnan(grace):
        raise ConfigError("--grace is no number of seconds")
    store = open_store(url, parsed_options(pairs, text))
    found = store.gc(Retention(keep_last or 1, keep_every, window), grace_s=grace, dry_run=dry_run)
    if as_json:
        lists = {name: [str(v) for v in getattr(found, name)] for name in ("retired", "restored", "waiting", "deleted")}
        kept = {str(version): list(reasons) for version, reasons in found.kept.items()}
        gone = {"orphans": [orphan.path for orphan in found.orphans], "leases": found.leases, "bytes_freed": found.bytes_freed}
        print_json({"url": store.url, "dry_run": dry_run, "kept": kept, **lists, **gone})
        return
    for version, reasons in found.kept.items():
        click.echo(f"{version!s:>10}  stays: {', '.join(reasons)}")
    would = "would go" if dry_run else "gone"
    lines = [
        (found.retired, f"{would} now, its data after {grace:g} s"),
        (found.restored, "back, since it is claimed"),
        (found.waiting, "went before, its data stays for now"),
        (found.deleted, f"went before, its data {would}"),
    ]
    for versions, line in lines:
        for version in versions:
            click.echo(f"{version!s:>10}  {line}")
    for orphan in found.orphans:
        click.echo(f"{orphan.path}: {would}, left by a publisher that died")
    click.echo(f"{size(found.bytes_freed)} {'would be ' if dry_run else ''}freed")


@weights.command("export")
@click.argument("location")
@click.argument("folder")
@click.option("--files", "files_from", metavar="FOLDER", help="Take config and tokenizer from this local folder, not from the version.")
@click.option("--weights-only", is_flag=True, help="Write no config and no tokenizer.")
@click.option("--shard-gb", type=click.FloatRange(min=0, min_open=True), default=4.0, show_default=True, help="Largest file, in 10^9 bytes.")
@click.option("--merged", is_flag=True, help="Of an adapter: write whole weights, its base with the adapter added in.")
@click.option("--force", is_flag=True, help="Replace the model that is in FOLDER.")
@two_stores_options
@json_option
@clean_errors()
def export_model(
    location: str, folder: str, files_from: str | None, weights_only: bool, shard_gb: float, merged: bool, force: bool, **given: Any
) -> None:
    """Writes a version into FOLDER (a path or URL) as transformers loads it; an adapter, unless merged, as peft loads it."""
    from pathlib import Path

    from storage.models.adapters import adapter_of
    from storage.models.folders import model_files
    from storage.models.huggingface import export_adapter, export_folder
    from storage.objects.store import ObjectStore

    if not math.isfinite(shard_gb):
        raise ConfigError("--shard-gb is no size: write a number of 10^9 bytes")
    if files_from is not None and weights_only:
        raise ConfigError("--files and --weights-only contradict each other: give one of them")
    options, to_options = both_options(location, folder, given)
    store, version = located(location, options)
    files = {} if weights_only else None if files_from is None else model_files(Path(files_from))
    with progress_bar(f"exporting {version}") as told:
        if adapter_of(store.commit(version), store.url) is not None and not merged:
            names = export_adapter(store, version, folder, storage_options=to_options, files=files, force=force)
        else:
            names = export_folder(
                store, version, folder, storage_options=to_options, files=files, shard_bytes=int(shard_gb * 1e9), force=force, progress=told
            )
    there = ObjectStore(folder, to_options).url
    said = {"url": store.url, "version": str(version), "folder": there, "files": names}
    say(given["as_json"], f"version {version} of {store.url} is in {there}: {', '.join(names)}", said)


@weights.command("import")
@click.argument("folder")
@click.argument("url", metavar="URL")
@click.option("--as", "spelled", metavar="VERSION", help="Publish as this version; default: 0-0 in an empty store, else step 0 of a new lineage.")
@click.option("--tag", "name", help="Put this tag on it.")
@two_stores_options
@json_option
@clean_errors()
def import_model(folder: str, url: str, spelled: str | None, name: str | None, **given: Any) -> None:
    """Publishes the Hugging Face model in FOLDER (a path or URL) as the newest version at URL."""
    from storage.keeping.tags import checked_tag
    from storage.models.huggingface import import_folder
    from storage.objects.store import ObjectStore

    if name is not None:
        checked_tag(name)
    options, to_options = both_options(folder, url, given)
    store = open_store(url, to_options)
    there = ObjectStore(folder, options).url
    with progress_bar(f"importing {there}"):
        version = import_folder(store, folder, version=None if spelled is None else parsed_version(spelled), storage_options=options)
    if name is not None:
        store.tag(name, version)
    say(given["as_json"], f"{there} is version {version} of {store.url}", {"url": store.url, "version": str(version), "folder": there, "tag": name})


@weights.command()
@click.argument("location")
@click.argument("other")
@click.option("--tensors", "each", is_flag=True, help="Print each tensor that differs, not only the whole.")
@two_stores_options
@json_option
@clean_errors()
def diff(location: str, other: str, each: bool, **given: Any) -> None:
    """Tells how OTHER differs from LOCATION; OTHER may be @REF, of the same store."""
    from storage.differences import differences, summary

    other = f"{split_location(location)[0]}{other}" if other.startswith("@") else other
    options, to_options = both_options(location, other, given)
    before, after = located(location, options), located(other, to_options)
    with progress_bar(f"comparing {before[1]} and {after[1]}") as told:
        found = list(differences(before, after, told))
    whole = summary(found)
    said = {"before": f"{before[0].url}@{before[1]}", "after": f"{after[0].url}@{after[1]}", "all": measured(whole)}
    if given["as_json"]:
        print_json({**said, "tensors": [difference(d) for d in found]})
        return
    for d in found:
        if d.kind not in ("changed", "same"):
            click.echo(
                f"{d.kind} {plain(d.name)}: " + " -> ".join("nothing" if at is None else f"{at[0]} {list(at[1])}" for at in (d.before, d.after))
            )
        elif each and d.kind == "changed":
            click.echo(f"{plain(d.name)}: {measures(measured(d))}")
    click.echo(f"{len(found)} tensors, {sum(d.kind != 'same' for d in found)} differ; all values: {measures(measured(whole))}")


@weights.command()
@click.argument("location")
@click.argument("url", metavar="URL")
@click.option("--all", "every", is_flag=True, help="Copy all versions, and where lineages branched off.")
@click.option("--tags", "with_tags", is_flag=True, help="Copy the tags of what is copied.")
@click.option("--full", is_flag=True, help="Copy the values alone, so that no version needs another.")
@two_stores_options
@json_option
@clean_errors()
def copy(location: str, url: str, every: bool, with_tags: bool, full: bool, **given: Any) -> None:
    """Copies a version, with all that it needs, into the store at URL; goes on where a copy broke off."""
    from storage.copying import copy_lineages, copy_tags, copy_version

    if every and split_location(location)[1] is not None:
        raise ConfigError("--all copies all versions: leave out @VERSION")
    options, to_options = both_options(location, url, given)
    source, version = located(location, options)
    target = open_store(url, to_options)
    copied = source.versions() if every else [version]
    for at in copied:
        with progress_bar(f"copying {at}") as told:
            copy_version(source, at, target, full=full, progress=told)
    if every:
        copy_lineages(source, target)
    tags = copy_tags(source, target, copied) if with_tags else {}
    said = {"from": source.url, "to": target.url, "versions": [str(v) for v in copied], "tags": {n: str(v) for n, v in tags.items()}}
    named = f", with the tags {', '.join(tags)}" if tags else ""
    say(given["as_json"], f"{target.url} holds {', '.join(map(str, copied))} of {source.url}{named}", said)
