"""One run that is open: the handles that a flow drives, and the state between its steps. The algorithm is the flow's."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from distributed import Client
from pydantic import TypeAdapter

from rollart.config import Config
from rollart.control.cut import LedgerCut
from rollart.control.ledger import Ledger
from rollart.draft_publisher import DraftPublisher
from rollart.engines.fleet import EngineFleet
from rollart.journal import Fates
from rollart.patience import patient
from rollart.rollout.coordinator import Rollout, begun_topic
from rollart.rollout.dispatcher import Dispatcher
from rollart.rollout.evaluation import Evaluation, evaluate_version
from rollart.rollout.placing import Places
from rollart.rollout.tables import evaluation_rows, settlement_rows, write_fates
from rollart.rollout.window import SubmissionWindow
from rollart.run import RunFolder
from rollart.telemetry import Telemetry
from rollart.tenure import Tenure
from rollart.training.handle import Trainer
from rollart.training.logprobs.stage import LogprobStage
from rollart.training.metrics import StepMetrics
from rollart.types import Attempt, Batch, Episode, Receipt, Version
from storage.errors import StoreError

T = TypeVar("T")

CUT = TypeAdapter(LedgerCut)
"""Spells a ledger's cut as JSON and reads it back."""

REFERENCE = "reference"
"""The checkpoint's document that says which version the reference policy is, where workers of another class than the trainer's hold it."""


class Interrupted(Exception):
    """The user asked the run to stop."""


class NoSignal(RuntimeError):
    """Step after step, no group carried any signal to learn from."""


@dataclass(frozen=True, slots=True)
class Handles:
    """What a session works with: the tenure of this process as the run's coordinator, the cluster's client, the trainer, the engines, the
    submission window, the places where attempts run, and the stage of reference and proximal log-probabilities, where the trainer doesn't
    compute them itself."""

    tenure: Tenure
    client: Client
    trainer: Trainer
    engines: EngineFleet
    window: SubmissionWindow
    places: Places
    logprobs: LogprobStage | None = None


class Session:
    """A run that is open. `version` is what training has reached; `resumed`: it came out of a checkpoint, `parent`."""

    def __init__(self, config: Config, folder: RunFolder, handles: Handles, telemetry: Telemetry, ledger: Ledger, parent: Version | None) -> None:
        self.config, self.folder, self.telemetry, self.ledger = config, folder, telemetry, ledger
        self.resumed = parent is not None
        self.client, self.trainer, self.engines, self.logprobs = handles.client, handles.trainer, handles.engines, handles.logprobs
        self.tenure, self.window, self.places = handles.tenure, handles.window, handles.places
        self.drafts = DraftPublisher(handles.trainer, {"run": folder.name}, telemetry.note)
        self.version = Version(ledger.lineage, ledger.next_step)
        self.stop = asyncio.Event()
        self._parent = parent
        self._publishing: asyncio.Task[None] | None = None
        self._collecting: asyncio.Task[None] | None = None
        self._rollout: Rollout | None = None
        self._dispatchers: list[Dispatcher] = []
        self._skipped = 0
        self._saved: Version | None = None
        self._beside: list[asyncio.Task[None]] = []

    def beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work`, which goes on for ever, beside the flow; an error that ends it ends what the flow waits for."""
        self._beside.append(asyncio.create_task(work))

    async def unless_stopped(self, work: Awaitable[T]) -> T:
        """The result of `work`; Interrupted as soon as the user asks to stop, and the error of what runs beside; the work is then cancelled."""
        doing, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait((doing, stopping, *self._beside), return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                return doing.result()
            for ended in filter(asyncio.Task.done, self._beside):
                ended.result()
            raise Interrupted("stopped by the user")
        finally:
            for task in (doing, stopping):
                task.cancel()
            await asyncio.gather(doing, stopping, return_exceptions=True)

    # ---- generating

    def rollout(self) -> Rollout:
        """Trajectories as the ledger plans them; an async context manager."""
        self._rollout = Rollout(
            self.ledger, self.dispatcher(), stall_s=self.config.run.step_timeout, observe=self.telemetry.observe, served=self.version.step,
            begun_topic=begun_topic(self.ledger.redundancy, self.folder.name, self.ledger.lineage), warn=self.telemetry.note,
        )  # fmt: skip
        return self._rollout

    async def scripted(self, plays: Mapping[str, int]) -> list[Receipt]:
        """Plays that many scripted episodes of each task; their receipts, in canonical order. The error of one that fails each of its
        `rollout.attempts` tries."""
        dispatcher = self.dispatcher()
        for task, episodes in plays.items():
            if episodes:
                dispatcher.dispatch([Attempt(Episode(task, i, "warm_up"), 0) for i in range(episodes)])
        receipts = []
        async for ended in dispatcher.ended(self.config.run.step_timeout):
            for end in ended:
                if end.member is not None:
                    receipts.append(end.member.receipt)
                elif end.attempt.number + 1 < self.config.rollout.attempts:
                    dispatcher.dispatch([end.attempt.retried()])
                else:
                    raise end.error or RuntimeError(f"{end.attempt} ended without a result")
            if not dispatcher.in_flight:
                break
        return sorted(receipts, key=lambda r: r.attempt)

    async def evaluate(self, episodes: int) -> Evaluation:
        """Measures the present version on held-out episodes; the engines stay on it to the end."""
        await self.published()
        self.telemetry.phase("evaluating")
        names = [t.name for t in self.config.tasks]
        with self.telemetry.stage("evaluate"):
            work = evaluate_version(self.dispatcher(), self.version, names, episodes, self.config.rollout.attempts, self.config.run.step_timeout)
            found = await self.unless_stopped(work)
        rows = evaluation_rows(found.members, self.version.lineage, self.version.step)
        await asyncio.to_thread(self.tenure.check)
        await asyncio.to_thread(write_fates, self.folder.store, "evaluate", self.version.lineage, self.version.step, rows)
        self.telemetry.evaluation(self.version.step, found, names)
        return found

    def in_flight(self) -> int:
        """Trajectories dispatched and not ended, whatever for."""
        return sum(d.in_flight for d in self._dispatchers)

    def dispatchers(self) -> list[Dispatcher]:
        """Everything that sends attempts to the cluster."""
        return self._dispatchers

    def awaited(self) -> str:
        """What the next batch still needs, in words."""
        return self._rollout.awaited() if self._rollout is not None else ""

    def dispatcher(self) -> Dispatcher:
        """A dispatcher whose Dask keys nothing else on the scheduler has."""
        made = Dispatcher(self.client, self.places, f"{self.folder.name}-{self.version.lineage}-{uuid.uuid4().hex[:6]}", self.window)
        self._dispatchers.append(made)
        return made

    # ---- training

    async def train_on(self, batch: Batch, wait_s: float) -> StepMetrics:
        """One training step on `batch`, then its settlement in the ledger: the batch counts as trained on once this is committed."""
        taught = self.ledger.teaching(batch)
        trained = await self._trained(taught, keep_state=self.due(self.config.train.checkpoint_every, batch.step + 1))
        self._parent, self.version = self.version, Version(batch.lineage, batch.step + 1)
        settlement = self.ledger.settle(batch)
        rows = settlement_rows(batch, settlement)
        # The ledger first: what stands in it counts, and whoever has lost the run may leave nothing that says otherwise.
        await asyncio.to_thread(self.tenure.commit, batch.lineage, batch.step, _spelled(rows))
        await asyncio.to_thread(write_fates, self.folder.store, "train", batch.lineage, batch.step, rows)
        waited = self._rollout.waited if self._rollout is not None else {}
        ledger = self.ledger
        self.telemetry.step(batch, taught, trained, ledger.tallies, str(self.version), wait_s=wait_s, waited=waited, ends=ledger.ends)
        self._watch_signal(trained)
        return trained

    async def _trained(self, taught: Batch, keep_state: bool) -> StepMetrics:
        if self.logprobs is None:
            with self.telemetry.stage("train"):
                return await self._patiently(f"training step {taught.step + 1}", self.trainer.train(taught, keep_state))
        async with self.logprobs.of(taught) as found:
            with self.telemetry.stage("logprobs"):
                await self._unless_unpublished(found.ready())
            with self.telemetry.stage("train"):
                training = found.beside(self.trainer.train(taught, keep_state, found.futures))
                return await self._patiently(f"training step {taught.step + 1}", training)

    async def _patiently(self, what: str, work: Awaitable[T]) -> T:
        """The result of what the trainer does. A worker process that is stuck is told of, and ends the run after `run.step_timeout`."""

        def tell(text: str) -> None:
            self.telemetry.event(text, {"kind": "told", "text": text})

        limits, name = self.config, f"{what} on the training class {self.config.stages['train']}"
        return await patient(work, name, silence_s=limits.rollout.silence, limit_s=limits.run.step_timeout, tell=tell)

    async def _unless_unpublished(self, work: Coroutine[Any, Any, None]) -> None:
        """Awaits `work`, which waits for the version that is being published; the error of the publication if that fails."""
        doing, publishing = asyncio.create_task(work), self._publishing
        try:
            if publishing is not None:
                await asyncio.wait((doing, publishing), return_when=asyncio.FIRST_COMPLETED)
                if not doing.done():
                    publishing.result()
            await doing
        finally:
            doing.cancel()

    def due(self, every: int, step: int) -> bool:
        """Whether something that happens every `every` steps happens after `step`; 0 is never."""
        return every > 0 and step % every == 0

    def _watch_signal(self, trained: StepMetrics) -> None:
        self._skipped = 0 if trained.optimiser_steps else self._skipped + 1
        if self._skipped >= self.config.train.max_skipped:
            raise NoSignal(
                f"train.max_skipped: in {self._skipped} steps in a row nothing was trained on (the last: {', '.join(trained.skipped)}; no_tokens and "
                "no_signal: all members of every group scored the same; masked: training.loss.mask left nothing); make the tasks easier or "
                "harder, warm the policy up, enlarge group_size, or widen the mask"
            )

    # ---- versions and checkpoints

    async def publish(self, metadata: dict[str, Any]) -> None:
        """Starts to publish the present version and to bring it to the engines, beside whatever comes next."""
        await self.published()
        self._publishing = asyncio.create_task(self._publish(self.version, self._parent, metadata))

    async def published(self) -> None:
        """Returns once the last `publish` is through: the version exists and every engine serves it."""
        if self._publishing is not None:
            await self._publishing
            self._publishing = None

    async def _publish(self, version: Version, parent: Version | None, metadata: dict[str, Any]) -> None:
        try:
            with self.telemetry.stage("publish"):
                await self._patiently(f"the publication of version {version}", self.trainer.publish(version, parent, metadata))
            with self.telemetry.stage("swap"):
                await self.engines.serve(version)
        except Exception as error:
            if self._rollout is not None:
                self._rollout.fail(error)  # it would wait for a version that never comes, until it calls that a stall
            raise
        if self._rollout is not None:
            self._rollout.advance(version.step)

    async def checkpoint(self) -> None:
        """Saves weights, optimiser, random state and the ledger's cut in one commit, unless the present version is saved already."""
        if self._saved == self.version:
            return
        cut = CUT.dump_python(dataclasses.replace(self.ledger.cut(), entry=self.tenure.last), mode="json")
        await self.published()
        await asyncio.to_thread(self.tenure.check)
        with self.telemetry.stage("checkpoint"):
            await self._patiently(f"checkpoint {self.version}", self.trainer.checkpoint(self.version, {"ledger": cut} | self._reference()))
        self._saved = self.version
        if self._collecting is not None:
            await self._collecting
        self._collecting = asyncio.create_task(self._collect())

    def _reference(self) -> dict[str, str]:
        return {} if self.logprobs is None else {REFERENCE: str(self.logprobs.reference)}

    async def _collect(self) -> None:
        """Removes versions and checkpoints that the run no longer keeps, beside whatever comes next. What stays in the way is told, and
        tried again after the next checkpoint: space is all that it costs."""
        try:
            with self.telemetry.stage("collect"):
                await self.trainer.collect(self.config.keeping)
        except StoreError as error:
            self.telemetry.note(f"old versions stay for now: {error}")

    async def end(self, state: str) -> None:
        """Writes how the run, or this part of it, ended. LedgerTaken, and nothing is written, if it has gone on with another coordinator."""
        await asyncio.to_thread(self.tenure.check)
        self.telemetry.end(state)

    async def close(self) -> None:
        """Ends what is under way: the publication and the removal of old versions are awaited, everything else in flight is cancelled."""
        for task in self._beside:
            task.cancel()
        await asyncio.gather(*self._beside, return_exceptions=True)
        under_way = [task for task in (self._publishing, self._collecting) if task is not None]
        await asyncio.gather(*under_way, self.drafts.published(), return_exceptions=True)
        for dispatcher in self._dispatchers:
            await dispatcher.close()
        await self.engines.close()


def _spelled(rows: Sequence[Mapping[str, Any]]) -> Fates:
    """Fate rows as the run's ledger has them."""
    return tuple((str(Attempt(Episode(r["task"], r["episode"], r["purpose"]), r["member"], r["attempt"])), r["nonce"], r["fate"]) for r in rows)
