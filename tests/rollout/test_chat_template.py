"""A chat template makes prompts that go on from each other, or is refused; it renders as transformers does."""

import json
from pathlib import Path

import pytest

from rollart.policy import train_tokenizer
from rollart.rollout.chat_template import ChatTemplate, TemplateRefused, of_folder

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORGETS = CHATML.replace("m['content']", "(m['content'].split('</think>')[-1] if m['role'] == 'assistant' else m['content'])")
COUNTS = "{{ messages | length }}" + CHATML
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML


def test_a_prompt_is_what_transformers_makes_of_the_same_messages(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["hello"])
    tokenizer.chat_template = "{{ eos_token }}" + CHATML
    tokenizer.save_pretrained(tmp_path)
    template = of_folder({p.name for p in tmp_path.iterdir()}, lambda name: (tmp_path / name).read_bytes())
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello\n"}]
    assert template.opening("be brief", "hello\n") == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert template.opening("", "hello\n") == tokenizer.apply_chat_template(messages[1:], tokenize=False, add_generation_prompt=True)


def test_what_follows_a_response_is_its_end_and_the_next_message() -> None:
    assert ChatTemplate(CHATML).following("", ["a", "b"]) == "<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    assert ChatTemplate(CHATML).following("s", ["a", "b", "c"]) == "<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("text", [FORGETS, COUNTS])
def test_a_template_that_changes_earlier_turns_is_refused_for_several_turns_only(text: str) -> None:
    ChatTemplate(text).check("s", 1)
    with pytest.raises(TemplateRefused, match=r"policy.chat: .* changes what it said in earlier turns .*max_turns 1"):
        ChatTemplate(text).check("s", 2)


def test_a_template_that_goes_on_from_itself_passes() -> None:
    ChatTemplate(CHATML).check("s", 9)


@pytest.mark.parametrize(("text", "reason"), [(NO_SYSTEM, "no system role"), ("{% for %}", "Expected"), ("{{ messages.x.y }}", "no attribute")])
def test_a_template_that_cannot_be_rendered_says_why(text: str, reason: str) -> None:
    with pytest.raises(TemplateRefused, match=rf"policy.chat: .* refuses messages of system, user and assistant \(.*{reason}"):
        ChatTemplate(text).check("s", 1)


def test_of_several_templates_the_default_one_is_taken() -> None:
    files = {
        "tokenizer_config.json": json.dumps({"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]}).encode()
    }
    assert of_folder(files, files.__getitem__).text == "d"


def test_special_tokens_are_known_to_the_template_however_they_are_written() -> None:
    said = {"chat_template": "{{ bos_token }}{{ eos_token }}", "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    files = {"tokenizer_config.json": json.dumps(said).encode()}
    assert of_folder(files, files.__getitem__).opening("", "x") == "<s></s>"


@pytest.mark.parametrize(
    ("files", "message"), [({}, "has no chat template; put one into its folder"), ({"tokenizer_config.json": b"["}, "can't be read")]
)
def test_a_model_without_a_template_is_refused(files: dict[str, bytes], message: str) -> None:
    with pytest.raises(TemplateRefused, match=message):
        of_folder(files, files.__getitem__)
