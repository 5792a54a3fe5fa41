"""Puts the policy's folder (config, tokenizer, and weights where it has them) into the run, as a Dask task on the training class."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollart import gguf
from rollart.agents.tool_calls import UnknownFormat, tool_format
from rollart.config import AgentSettings, Config, ConfigError, TaskSettings
from rollart.control.seeds import derive
from rollart.environments import registry
from rollart.environments.protocol import Scripted, StepResult, is_agent
from rollart.rewards import registry as rewards
from rollart.rollout import chat_template
from storage.errors import StoreError
from storage.models.folders import upload_folder

if TYPE_CHECKING:
    from storage.models.model import Model


def check_inputs(config: Config, prepared: bool = False) -> None:
    """ConfigError, one line a problem, unless every task's environment can be made, every verifier found, and the policy's model is one.

    A run that has been `prepared` has its own copy of the model and asks for the original no more.
    """
    problems = []
    if config.run.root.startswith("memory:"):
        problems.append(f"run.root: {config.run.root} is seen by one process alone, and a run has several; give a path, or a URL that all can reach")
    for task in config.tasks:
        try:
            made = registry.make(task.environment, **task.settings)
            rewards.resolve(task.reward)
        except (ValueError, TypeError, ImportError) as error:
            problems.append(f"tasks.{task.name}: {error}")
            continue
        problems += _problems_of_agent(config, task) if is_agent(made) else _problems_of_no_agent(task)
        scripted = isinstance(made, Scripted) and not is_agent(made)
        if config.warm_up.steps and config.warm_up.episodes.get(task.name) and not scripted:
            problems.append(f"warm_up.episodes.{task.name}: environment {task.environment!r} has no script() to play by; set it to 0")
    if config.policy.model is not None and not prepared:
        problems += _problems_of_model(config, config.policy.model)
    if problems:
        raise ConfigError("\n".join(problems))


def _problems_of_agent(config: Config, task: TaskSettings) -> list[str]:
    """What speaks against an agent's task."""
    name, agent = f"tasks.{task.name}", task.agent
    problems = []
    if config.rollout.lease <= agent.run_timeout:
        problems.append(f"rollout.lease: {config.rollout.lease:g} s end before {name}.agent.run_timeout ({agent.run_timeout:g} s) can; raise it")
    if task.system:
        problems.append(f"{name}.system: an agent writes its own messages; leave it out")
    try:
        tool_format(agent.tool_format)
    except UnknownFormat as error:
        problems.append(f"{name}.agent.tool_format: {error}")
    return problems


def _problems_of_no_agent(task: TaskSettings) -> list[str]:
    if task.agent == AgentSettings():
        return []
    return [f"tasks.{task.name}.agent: environment {task.environment!r} is no agent; leave it out"]


def _problems_of_model(config: Config, location: str) -> list[str]:
    """What speaks against starting from the model at `location`: it isn't there or whole, or doesn't go with the rest of `config`."""
    from storage.models.model import Model

    try:
        model = Model(location, config.run.storage_options)
        if model.gguf is not None:
            return _problems_of_gguf(config, model)
        missing = [name for name in ("config.json", "tokenizer.json") if name not in model.names()]
        if missing:
            remedy = "give a folder of a Hugging Face causal language model, or a version that was published with these files"
            return [f"policy.model: {model} has no {' and no '.join(missing)}; {remedy}"]
        said = dict(json.loads(model.file("config.json")))
    except StoreError as error:
        return [f"policy.model: {error}"]
    except (ValueError, TypeError) as error:
        return [f"policy.model: {location}/config.json is no JSON object ({error}); give the folder of a Hugging Face causal language model"]
    text = said.get("text_config")
    positions = (text if isinstance(text, dict) else said).get("max_position_embeddings", said.get("n_positions"))
    return [*_problems_of_positions(config, positions, model), *_problems_of_chat(config, lambda: chat_template.of_folder(model.names(), model.file))]


def _problems_of_gguf(config: Config, model: Model) -> list[str]:
    """The same for a GGUF model; of one that is not on this machine only whether it is there, since its header may be all over it."""
    try:
        gguf.check_packages(str(model))
        model.names()
        if "://" in str(model):
            return []
        said = gguf.header(Path(str(model)))
    except ConfigError as error:
        return [str(error)]
    template = str(said.get(gguf.CHAT_TEMPLATE, ""))
    return [*_problems_of_positions(config, gguf.max_positions(said), model), *_problems_of_chat(config, lambda: chat_template.of_text(template))]


def _problems_of_positions(config: Config, positions: Any, model: Model) -> list[str]:
    if isinstance(positions, int) and positions < config.engine.max_length:
        return [f"engine.max_length: {config.engine.max_length} is over the {positions} positions of policy.model {model}; lower it"]
    return []


def _problems_of_chat(config: Config, template: Callable[[], chat_template.ChatTemplate]) -> list[str]:
    """What speaks against the chat template, where one is asked for: it is not there, or cannot say what some task needs."""
    if not config.policy.chat:
        return []
    try:
        found = template()
        for task in config.tasks:
            if not _is_agent(task.environment):  # an agent's segments end where the template changes what it said
                found.check(task.system, task.max_turns)
    except (ConfigError, StoreError) as error:
        return [str(error)]
    return []


def _is_agent(environment: str) -> bool:
    try:
        return is_agent(registry.resolve(environment))
    except registry.UnknownEnvironment:  # which is told of elsewhere
        return False


class EnvironmentBroken(RuntimeError):
    """An environment can't play the episodes from which a tiny policy's tokenizer learns; the message names the task."""


SAMPLE_EPISODES = 200
"""Episodes a task whose text a tiny policy's tokenizer learns from: enough to see every word of the shipped tasks."""


def prepare_policy_task(config: Config, url: str, storage_options: dict[str, Any]) -> None:
    """Writes the policy's folder to `url`: a copy of the one that the configuration names, what a GGUF file makes in the trainer's number
    format, or a tiny one made for the tasks' text."""
    from rollart.policy import build_policy, load_config, load_tokenizer

    policy = config.policy
    if policy.model is not None:
        from storage.models.model import Model

        model = Model(policy.model, storage_options)
        with model.folder() as found, tempfile.TemporaryDirectory(prefix="rollart-policy-") as scratch:
            source = found
            if model.gguf is not None:
                source = Path(scratch)
                gguf.save_as_hugging_face(found / model.gguf, source, config.training.model.dtype)
            load_config(source)
            load_tokenizer(source)
            upload_folder(source, url, storage_options)
        return
    tiny = policy.tiny
    if tiny is None:
        raise ValueError("give one of policy.model and policy.tiny")
    with tempfile.TemporaryDirectory(prefix="rollart-policy-") as scratch:
        folder = build_policy(
            Path(scratch), episode_texts(config.tasks, config.run.seed), vocab=tiny.vocab, hidden=tiny.hidden_size, layers=tiny.layers,
            heads=tiny.heads, feed_forward=tiny.intermediate_size, context=tiny.max_length,
        )  # fmt: skip
        upload_folder(folder, url, storage_options)


def episode_texts(tasks: Sequence[TaskSettings], seed: int) -> Iterator[str]:
    """What the tasks' environments say, and what their scripted players answer, over `SAMPLE_EPISODES` episodes each."""
    for task in tasks:
        for index in range(SAMPLE_EPISODES):
            rng = random.Random(derive(seed, "tokenizer", task.name, index))
            try:
                texts = list(_texts(task, rng))
            except BaseException as error:  # an environment's own code, which may end in anything
                raise EnvironmentBroken(f"tasks.{task.name}: environment {task.environment!r} raised {type(error).__name__}: {error}") from error
            wrong = [text for text in texts if not isinstance(text, str)]
            if wrong:
                raise EnvironmentBroken(f"tasks.{task.name}: environment {task.environment!r} said {wrong[0]!r}, which is no text")
            yield from (text.encode(errors="replace").decode() for text in texts)


def _texts(task: TaskSettings, rng: random.Random) -> Iterator[Any]:
    environment: Any = registry.make(task.environment, **task.settings)
    if is_agent(environment):  # what it says isn't known before it runs; the words around its messages are
        yield "system: user: assistant: tool: \n"
        return
    scripted = isinstance(environment, Scripted)
    try:
        yield _now(environment.reset(rng.getrandbits(31)))
        for _ in range(task.max_turns if scripted else 0):
            action = environment.script(rng)
            result: StepResult = _now(environment.step(action))
            yield action
            yield result.observation
            if result.terminated or result.truncated:
                break
    finally:
        _now(environment.close())


def _now(value: Any) -> Any:
    """The result of a call that may be a coroutine, from code that has no event loop."""
    if not hasattr(value, "__await__"):
        return value
    import asyncio

    return asyncio.run(value)
