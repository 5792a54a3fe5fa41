"""Runs a flow in this process, from the run's folder to its report; owns Ctrl-C and how an ending becomes an exit code."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import pkgutil
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from typing import Any

import psutil
from rich.console import Console

from rollart.cluster import MissingResource, look
from rollart.config import Config, ConfigError
from rollart.dashboard.metrics import read_metrics
from rollart.dashboard.progress import Mode
from rollart.dashboard.report import write_report
from rollart.dashboard.samples import sample_trajectories
from rollart.dashboard.summary import summarize
from rollart.dashboard.summary_table import summary_table
from rollart.opening import POLICY, open_session
from rollart.preparation import check_inputs
from rollart.rollout.tables import compact, score_table
from rollart.run import RunFolder
from rollart.session import Interrupted, Session
from rollart.tenure import LedgerTaken, coordinating
from storage.errors import StoreError

DONE, USER_ERROR, FAILED, INTERRUPTED = 0, 2, 3, 130

Flow = Callable[[Session], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended: its folder, the table and figures of what it came to, and the error if there was one."""

    url: str
    exit_code: int
    table: str = ""
    summary: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


class Stopper:
    """Ctrl-C: once asks the flow to stop and waits for it, twice kills everything at once."""

    def __init__(self) -> None:
        self._asked = False
        self._main = asyncio.current_task()
        self.session: Session | None = None

    def __call__(self) -> None:
        if self._asked:
            kill_children()
            os._exit(INTERRUPTED)
        self._asked = True
        if self.session is not None:
            self.session.telemetry.note("stopping: finishing the step, saving a checkpoint; Ctrl-C again kills at once")
            self.session.stop.set()
        elif self._main is not None:
            print("stopping: ending what has started; Ctrl-C again kills at once", file=sys.stderr, flush=True)
            self._main.cancel()


def run_flow(flow: str, config: Config, *, resume: bool, mode: Mode) -> Ended:
    """Runs the flow called `flow`. ConfigError or StoreError where it can't start; any other failure is in what it returns."""
    run: Flow = pkgutil.resolve_name(f"flows.{flow}:{flow}")
    folder = RunFolder.resume(config) if resume else None
    check_inputs(config, prepared=folder is not None and folder.store.exists(f"{POLICY}/config.json"))
    _, problems = look(config)
    if problems:
        raise MissingResource("\n".join(problems))
    if folder is None:  # made last, so that a run that can't start leaves nothing
        folder = RunFolder.create(config, flow)
        try:
            return asyncio.run(_run(run, config, folder, resume, mode))
        finally:
            with contextlib.suppress(StoreError):  # what ended the run is told; where it can't be looked at, its name stays taken
                if not folder.began():
                    folder.discard()
    return asyncio.run(_run(run, config, folder, resume, mode))


async def _run(run: Flow, config: Config, folder: RunFolder, resume: bool, mode: Mode) -> Ended:
    stopper = Stopper()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stopper)
    async with contextlib.AsyncExitStack() as stack:  # the lease outlasts the session: what follows on it writes to the run too
        exit_code, error = DONE, None
        try:
            tenure = await stack.enter_async_context(coordinating(folder.store, config.run.lease))
            async with open_session(config, folder, tenure, resume=resume, mode=mode) as session:
                stopper.session = session
                try:
                    await run(session)
                    session.telemetry.phase("done")
                    await session.end("done")
                except Interrupted:
                    exit_code, error = INTERRUPTED, f"interrupted; go on with --resume --set run.name={folder.name}"
                    await _ended(session, "interrupted")
                except Exception as failure:  # noqa: BLE001 - told, and turned into an exit code
                    exit_code, error = FAILED, _told(failure, session, config.run.scheduler)
                    await _ended(session, "failed")
        except asyncio.CancelledError:
            exit_code, error = INTERRUPTED, "interrupted before the run began"
        except (ConfigError, StoreError) as failure:
            if stopper.session is None:
                raise
            exit_code, error = FAILED, error or f"the run's end could not be written: {failure}"
        except Exception as failure:  # noqa: BLE001 - told, and turned into an exit code
            exit_code, error = FAILED, error or explain(failure)
        if exit_code != DONE or error is not None:
            return Ended(folder.url, exit_code, error=error)
        return await asyncio.to_thread(_finish, folder, {receipt.nonce for receipt in session.ledger.held()})


async def _ended(session: Session, state: str) -> None:
    """Writes how a run ended that ended badly, if it can be written: what ended it is told either way."""
    with contextlib.suppress(LedgerTaken, StoreError):
        await session.end(state)


def _finish(folder: RunFolder, held: set[str]) -> Ended:
    """Compacts an ended run's trajectories and reports on it; a store that fails now costs the report, not the run."""
    try:
        compact(folder.url, folder.storage_options, held)
        url, summary, table = report_on(folder)
    except StoreError as failure:
        return Ended(folder.url, FAILED, error=f"the run is done, but not its report: {failure}; try `rollart report {folder.url}`")
    return Ended(folder.url, DONE, f"{table}\nrun: {folder.url}\nreport: {url}", summary)


def report_on(folder: RunFolder) -> tuple[str, dict[str, Any], str]:
    """Writes the run's report; its URL, the summary's figures, and the summary as a table."""
    rows = score_table(folder.url, folder.storage_options)
    samples = sample_trajectories(folder, rows)
    url = write_report(folder.url, folder.storage_options, rows, samples)
    summary = summarize(read_metrics(folder.url, folder.storage_options), rows)
    text = io.StringIO()
    Console(file=text, width=100).print(summary_table(summary))
    return url, summary.to_dict(), text.getvalue()


def _told(failure: Exception, session: Session, scheduler: str | None) -> str:
    """One line for what ended the run. That the scheduler is gone each part of Dask says in words of its own."""
    if scheduler is None or session.client.status == "running" or _own(failure):
        return explain(failure)
    return f"run.scheduler: {scheduler} is gone; start it and its workers again, and go on with --resume"


def explain(failure: BaseException) -> str:
    """One line for a failure that says what it is; the whole traceback besides for one that nobody foresaw."""
    if _own(failure):
        return str(failure)
    traceback.print_exception(failure)
    return f"{type(failure).__name__}: {failure}"


def _own(failure: BaseException) -> bool:
    """Whether it is one of this project's errors, which say what they are."""
    return type(failure).__module__.partition(".")[0] in ("rollart", "storage")


def kill_children() -> None:
    """Kills every process below this one, at once, but for the one that removes the semaphores of the others: it ends by itself."""
    tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]  # there is no public word for it
    for child in psutil.Process().children(recursive=True):
        if child.pid != tracker:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
