"""Makes or opens a policy: a local Hugging Face folder of config and tokenizer; owns the tiny quick-start policy, never asks a hub."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"
PIECES = r"[0-9]| ?[A-Za-z]+|[\r\n]|[^\sA-Za-z0-9]|\s"
"""No token crosses these: digits, signs (a board's cells) and line ends stand alone, a word takes the space before it along."""


class PolicyError(ValueError):
    """A folder holds no policy, or the policy asked for cannot be made; the message names the folder or the field."""


def train_tokenizer(texts: Iterable[str], vocab: int = 512) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `vocab` tokens, trained on `texts`: any text round-trips, that of `texts` is short.

    Ids 0 and 1 are the padding and end-of-response tokens, the next 256 the single bytes. Equal texts give an equal tokenizer.
    """
    if vocab < 258:
        raise PolicyError(f"vocab is {vocab}; 256 bytes and two special tokens need at least 258")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECES), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[PAD, EOS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False)


def build_policy(
    folder: str | Path,
    texts: Iterable[str],
    *,
    vocab: int = 512,
    hidden: int = 128,
    layers: int = 4,
    heads: int = 4,
    feed_forward: int = 256,
    context: int = 512,
) -> Path:
    """Writes a new Llama-shaped policy into `folder`: `config.json` and the tokenizer's files, trained on `texts`; no weights.

    Returns the folder. The width of the vocabulary is what the tokenizer came to have, rounded up to a multiple of 8.
    PolicyError if `hidden` is no multiple of 2 * `heads`.
    """
    if hidden % (2 * heads):
        raise PolicyError(f"hidden is {hidden}; it must be a multiple of 2 * heads ({2 * heads}), since rotary positions work on pairs")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(texts, vocab)
    tokenizer.save_pretrained(folder)
    LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=-(-len(tokenizer) // 8) * 8, hidden_size=hidden, intermediate_size=feed_forward,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=context,
        tie_word_embeddings=True, bos_token_id=None, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def load_config(folder: str | Path) -> Any:
    """The Hugging Face config of a local folder; PolicyError if there is none."""
    _require(folder, "config.json")
    return AutoConfig.from_pretrained(folder, local_files_only=True)


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a local folder; PolicyError if it has none or lacks an end token. A missing padding token becomes the end token."""
    _require(folder, "tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if tokenizer.eos_token_id is None:
        raise PolicyError(f"the tokenizer in {folder} has no end-of-sequence token; a response could not end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def init_model(config: Any, seed: int) -> Any:
    """A causal language model of `config` with fresh weights (fp32, on the CPU) that follow from `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _require(folder: str | Path, *names: str) -> None:
    if not any((Path(folder) / name).is_file() for name in names):
        raise PolicyError(f"{folder} is no policy folder: it has no {' or '.join(names)}")
