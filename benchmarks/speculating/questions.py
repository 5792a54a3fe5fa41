"""Questions of SmolLM2's three tasks as prompts, those that a draft may have seen and those that it hasn't. Samples nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml
from transformers import AutoTokenizer

from rollart.control.seeds import environment_seed
from rollart.environments.reasoning import Reasoning, ReasoningSettings
from rollart.types import Episode, Purpose

CONFIG = Path(__file__).parents[2] / "flows" / "configs" / "smollm2.yaml"
SYSTEM = "Think step by step, then say the answer."
"""In place of the tasks' own, which asks for the number alone: a response of four tokens leaves nothing to draft."""

RUN_SEED = 0


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt, and the task that asks it."""

    task: str
    prompt: tuple[int, ...]


def questions(folder: Path, purpose: Purpose, first: int, count: int) -> list[Question]:
    """`count` questions from number `first` on, the tasks in turns, as a run of that purpose draws them."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tasks = yaml.safe_load(CONFIG.read_text())["tasks"]
    environments = {task["name"]: Reasoning(ReasoningSettings(**task["settings"])) for task in tasks}
    found = []
    for index in range(first, first + count):
        name = tasks[index % len(tasks)]["name"]
        shown = environments[name].reset(environment_seed(RUN_SEED, Episode(name, index // len(tasks), purpose)))
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": shown}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        found.append(Question(name, tuple(tokenizer(text, add_special_tokens=False)["input_ids"])))
    return found
