"""A run's folder under an fsspec URL; owns its names and what may be done with a folder that is there already."""

from __future__ import annotations

import datetime
import json
import time
from typing import Any

from rollart import lease
from rollart.config import RESUMABLE, Config, ConfigError, RunSettings, changed_fields, parse
from rollart.journal import LEDGER, Journal, LedgerDamaged
from storage.objects.store import ObjectStore

CONFIG = "config.yaml"
ABOUT = "run.json"


class RunExists(ConfigError):
    """The run's folder holds a run already."""


class RunMissing(ConfigError):
    """There is no run to resume or to report on."""


class RunDamaged(ConfigError):
    """A run's own small files aren't what a run writes."""


class RunFolder:
    """Where everything of a run stands: `config.yaml`, `weights/`, `trajectories/`, `ledger/`, `checkpoints/`, `metrics/`, `report.html`."""

    def __init__(self, url: str, storage_options: dict[str, Any] | None = None) -> None:
        self.storage_options = dict(storage_options or {})
        self.store = ObjectStore(url.rstrip("/"), self.storage_options)
        self.url = self.store.url  # absolute, since workers stand in another folder

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def child(self, part: str) -> str:
        """The URL of one part of the run, such as `weights`."""
        return f"{self.url}/{part}"

    def config(self) -> Config:
        """The resolved configuration that the run was started with."""
        if not self.store.exists(CONFIG):
            raise RunMissing(f"{self.url} holds no run (no {CONFIG}); `rollart runs` lists what there is")
        data = self.store.read(CONFIG)
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise RunDamaged(f"{self.child(CONFIG)} is no UTF-8 text; a run's configuration can't be made again, so start a new run") from error
        return parse(text, source=self.child(CONFIG))

    @classmethod
    def create(cls, config: Config, flow: str) -> RunFolder:
        """The folder of a new run, with its configuration in it. RunExists if the name is taken."""
        name = config.run.name or f"{flow}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
        folder = cls(f"{config.run.root.rstrip('/')}/{name}", config.run.storage_options)
        folder.store.check_writable()
        named = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
        if not folder.store.create(CONFIG, named.to_yaml().encode()):
            lease.refuse_if_held(folder.store)
            raise RunExists(f"run.name: {folder.url} holds a run already; go on with --resume, or choose another name with --set run.name=NAME")
        folder.store.write(ABOUT, json.dumps({"flow": flow, "created": time.time()}).encode())
        return folder

    def began(self) -> bool:
        """Whether there is anything of the run but what opening it makes: a version, a trajectory, or another entry in its ledger."""
        return bool(self.store.list("weights") or self.store.list("trajectories") or Journal(self.store).last() > 0)

    def discard(self) -> None:
        """Removes a run that never began: its configuration, its policy's folder, its metrics and its first entry, which are all that it has."""
        for part in ("policy", "metrics", LEDGER):
            self.store.delete(part, recursive=True)
        for name in (ABOUT, CONFIG):
            self.store.delete(name)

    @classmethod
    def resume(cls, config: Config) -> RunFolder:
        """The folder of the run that `config` names, or of the newest one; ConfigError if a field changed that may not, RunHeld if another
        process runs it."""
        folder = find(config.run)
        lease.refuse_if_held(folder.store)
        old = folder.config()
        changed = [p for p in changed_fields(old, config) if p not in ("run.name", "run.root")]
        if changed:
            raise ConfigError(
                f"{', '.join(changed)}: may not change on --resume of {folder.url}, since the curve would be one of two experiments; "
                f"set them back as its config.yaml says, or start a new run (what may change: {', '.join(sorted(RESUMABLE))})"
            )
        return folder

    def keep(self, config: Config) -> None:
        """Stores what a resumed run goes on with as its configuration."""
        run = config.run.model_copy(update={"name": self.name})
        self.store.write(CONFIG, config.model_copy(update={"run": run}).to_yaml().encode())


def find(run: RunSettings) -> RunFolder:
    """The folder of the run that `run` names, or of the newest one; RunMissing if there is none."""
    root = run.root.rstrip("/")
    name = run.name or newest(root, run.storage_options)
    if name is None:
        raise RunMissing(f"--resume: {root} holds no run; start one without --resume")
    return RunFolder(f"{root}/{name}", run.storage_options)


def names(root: str, storage_options: dict[str, Any] | None = None) -> list[str]:
    """The runs under `root`, oldest first."""
    store = ObjectStore(root, storage_options)
    found = [p for p in store.list("") if p.count("/") == 1 and p.endswith(f"/{ABOUT}")]
    created = {p.partition("/")[0]: _about(store, p)["created"] for p in found}
    return sorted(created, key=lambda name: created[name])


def newest(root: str, storage_options: dict[str, Any] | None = None) -> str | None:
    """The run under `root` that was started last, None if there is none."""
    found = names(root, storage_options)
    return found[-1] if found else None


def about(root: str, name: str, storage_options: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a list of runs says of one: name, flow, when it was created (unix seconds), and how far it is: `steps` that count, None where its
    ledger is damaged, and `state`, which ends in running, reported (it ended whole) or stopped."""
    store = ObjectStore(f"{root.rstrip('/')}/{name}", storage_options)
    entry = _about(store, ABOUT)
    try:
        steps = Journal(store).steps()
    except LedgerDamaged as error:  # said of this run, in a list that has others
        return {"name": name, **entry, "steps": None, "state": f"damaged: {error}"}
    held = lease.read(store)
    running = held is not None and held.holds(time.time())
    state = "running" if running else "reported" if store.exists("report.html") else "stopped"
    return {"name": name, **entry, "steps": steps, "state": f"{steps} steps, {state}"}


def _about(store: ObjectStore, path: str) -> dict[str, Any]:
    """What `run.json` at `path` says: flow and when the run was created; RunDamaged if it says neither."""
    try:
        found = json.loads(store.read(path))
        datetime.datetime.fromtimestamp(found["created"])
        return {"flow": str(found["flow"]), "created": float(found["created"])}
    except (ValueError, KeyError, TypeError, OverflowError, OSError, RecursionError) as error:
        raise RunDamaged(f"{store.url}/{path} is not what a run writes there; remove that folder, or move it elsewhere") from error
