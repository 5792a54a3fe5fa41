"""The least policy that text needs to become tokens, for runs whose responses are scripted; has no weights."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def byte_policy(folder: Path) -> str:
    """Makes `folder`, with a tokenizer that has one token a byte and an end of sequence, 0; its path."""
    folder.mkdir()
    vocabulary = {c: i for i, c in enumerate(["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    return str(folder)
