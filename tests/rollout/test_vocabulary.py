"""Token in, token out: over turns of a chat, what was sampled stays as it is, and each prompt is the one before, the response, and the rest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import LlamaConfig

from rollart.environments.protocol import StepResult
from rollart.policy import load_tokenizer, train_tokenizer
from rollart.rollout.episode import EpisodeRunner, Limits
from rollart.rollout.vocabulary import Vocabulary
from rollart.types import Attempt, Episode, GenerateRequest, GenerateResult, SamplingTransform, Version
from tests.smollm2 import save_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'user' %}{{ ' so' }}{% endif %}{% endfor %}"
OBSERVATIONS = ["hello", "hello again\n", "\n", "  again", "hello"]
SYSTEM = "be brief"


@pytest.fixture(scope="module", params=["small", "smollm2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of a ChatML model: a small one that knows the markers as special tokens, and the real one if it is installed."""
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "smollm2":
        save_tokenizer(path)
        return path
    save(path, CHATML, "<|im_end|>", "<|im_start|>")
    return path


def save(path: Path, template: str, *special: str) -> None:
    tokenizer = train_tokenizer(["hello again so be brief\n\n assistant user system  hello"] * 20, vocab=320)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    LlamaConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(path)


class Speaks:
    """Says `OBSERVATIONS`, one a turn."""

    def reset(self, seed: int) -> str:
        self.turn = 0
        return OBSERVATIONS[0]

    def step(self, action: str) -> StepResult:
        self.turn += 1
        done = self.turn == len(OBSERVATIONS)
        return StepResult("" if done else OBSERVATIONS[self.turn], terminated=done)

    def close(self) -> None: ...


class Samples:
    """Answers with the given ids, turn by turn, and remembers what it was asked."""

    def __init__(self, responses: Sequence[Sequence[int]]) -> None:
        self.responses, self.asked = responses, list[tuple[int, ...]]()

    async def __call__(self, request: GenerateRequest) -> GenerateResult:
        ids = tuple(self.responses[len(self.asked)])
        self.asked.append(tuple(request.input_ids))
        finish = "stop" if ids[-1] in request.stop_token_ids else "length"
        return GenerateResult(request.rid, ids, (-0.5,) * len(ids), (Version(0, 0),) * len(ids), finish, len(request.input_ids), cached_tokens=0)


async def played(vocabulary: Vocabulary, responses: Sequence[Sequence[int]]) -> tuple[Samples, list[int]]:
    policy = Samples(responses)
    runner = EpisodeRunner(vocabulary, Limits(9, 64, 4096), SamplingTransform(), run_seed=1, lineage=0, system=SYSTEM, run_in="loop")
    trajectory = await runner.play(Speaks(), Attempt(Episode("chat", 0), 0), policy)
    (segment,) = trajectory.segments
    assert [segment.ids[t.start : t.end] for t in segment.turns] == [list(r) for r in responses]
    return policy, segment.ids


def messages(answers: Sequence[str]) -> list[dict[str, str]]:
    """The conversation up to the observation that is to be answered next."""
    said = [{"role": "system", "content": SYSTEM}]
    for turn, observation in enumerate(OBSERVATIONS[: len(answers) + 1]):
        said.append({"role": "user", "content": observation})
        if turn < len(answers):
            said.append({"role": "assistant", "content": answers[turn]})
    return said


async def test_where_responses_are_encoded_as_their_text_is_each_prompt_is_the_whole_rendered_anew(folder: Path) -> None:
    vocabulary, tokenizer = Vocabulary(folder, chat=True), load_tokenizer(folder)
    answers = ["hello", " again\n", "hello again", " so\n\n", "again"]
    end = vocabulary.eos_ids[0]
    assert vocabulary.decode([end]) == "" and tokenizer.convert_ids_to_tokens(end) == "<|im_end|>"
    policy, _ = await played(vocabulary, [[*vocabulary.encode(a), end] for a in answers])
    for turn, asked in enumerate(policy.asked):
        text = tokenizer.apply_chat_template(messages(answers[:turn]), tokenize=False, add_generation_prompt=True)
        assert list(asked) == tokenizer(text, add_special_tokens=False)["input_ids"], turn


async def test_over_five_turns_sampled_ids_stay_though_their_text_would_merge_otherwise(folder: Path) -> None:
    vocabulary = Vocabulary(folder, chat=True)
    end = vocabulary.eos_ids[0]
    letters = [i for c in "hello" for i in vocabulary.encode(c)]
    assert len(vocabulary.encode("hello")) < len(letters)  # as text it would be fewer tokens
    newline = vocabulary.encode("\n")  # merges with the template's own line end
    responses = [[*letters, end], [*letters, *newline, end], [*newline, *newline], letters, [end]]  # two are cut, one is empty
    policy, ids = await played(vocabulary, responses)
    for turn in range(1, 5):
        before = [*policy.asked[turn - 1], *responses[turn - 1]]
        asked = list(policy.asked[turn])
        assert asked[: len(before)] == before, turn
        cut = responses[turn - 1][-1] != end
        closed = "<|im_end|>" if cut else ""
        rest = f"{closed}\n<|im_start|>user\n{OBSERVATIONS[turn]}<|im_end|>\n<|im_start|>assistant\n"
        assert load_tokenizer(folder).decode(asked[len(before) :]) == rest, turn
        assert asked.count(end) == 2 * turn + 2, turn  # each message is ended once: the system's, and an observation and a response a turn
    assert ids == [*policy.asked[-1], end]


async def test_a_template_without_markers_never_merges_over_its_borders(tmp_path: Path) -> None:
    save(tmp_path, PLAIN)
    vocabulary = Vocabulary(tmp_path, chat=True)
    eos = vocabulary.eos_ids[0]
    cut = vocabulary.encode("hell")
    policy, _ = await played(vocabulary, [cut, cut, [*cut, eos], cut, cut])
    for turn in range(1, 5):
        before = [*policy.asked[turn - 1], *([*cut, eos] if turn == 3 else cut)]
        assert list(policy.asked[turn]) == [*before, *vocabulary.encode(OBSERVATIONS[turn] + " so")]


def test_without_chat_observations_follow_as_they_are(folder: Path) -> None:
    vocabulary = Vocabulary(folder)
    assert vocabulary.prompt(["hello"], None, "") == vocabulary.encode("hello", first=True)
    assert vocabulary.prompt(["hello", " again"], vocabulary.eos_ids[0]) == vocabulary.encode(" again")
