"""The size of a draft head and of the policy that it is for; owns which policies it fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollart.drafts.errors import DraftError

__all__ = ["KIND", "HeadConfig"]

KIND = "rollart_draft_head"
"""What stands as `model_type` in a head's config.json."""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A head of `width` D, of which each of `heads` attention heads has D / heads numbers and `kv_heads` have keys, over `kept` R tokens.

    The policy that it is for: its `policy_type` as transformers names it, its `policy_layers`, `hidden` size H, and `vocabulary` V.
    DraftError, with the field's name, for sizes that can't be.
    """

    policy_type: str
    policy_layers: int
    hidden: int
    vocabulary: int
    kept: int
    width: int
    heads: int
    kv_heads: int
    intermediate: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("policy_layers", "hidden", "vocabulary", "kept", "width", "heads", "kv_heads", "intermediate"):
            if getattr(self, name) < 1:
                raise DraftError(f"{name} is {getattr(self, name)}; it has to be at least 1")
        if self.width % (2 * self.heads):
            raise DraftError(f"width {self.width} doesn't give each of {self.heads} heads an even number of dimensions; change one of them")
        if self.heads % self.kv_heads:
            raise DraftError(f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}; change one of them")
        if self.kept > self.vocabulary:
            raise DraftError(f"kept is {self.kept}, over the vocabulary of {self.vocabulary}; lower it")

    @property
    def head_dim(self) -> int:
        """Dimensions of one attention head."""
        return self.width // self.heads

    @classmethod
    def of(cls, policy: Any, *, kept: int | None = None, width: int | None = None, heads: int | None = None) -> HeadConfig:
        """For the policy of that transformers config: of its own width, heads and MLP unless said otherwise, over all of its tokens unless
        `kept` says how many. A narrower MLP goes with a smaller `width`."""
        text = policy.get_text_config()
        hidden, vocabulary = int(text.hidden_size), int(text.vocab_size)
        wide = hidden if width is None else width
        many = int(text.num_attention_heads) if heads is None else heads
        shared = int(getattr(text, "num_key_value_heads", None) or many)
        mlp = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * hidden
        return cls(
            policy_type=str(text.model_type), policy_layers=int(text.num_hidden_layers), hidden=hidden, vocabulary=vocabulary,
            kept=vocabulary if kept is None else kept, width=wide, heads=many, kv_heads=shared if many % shared == 0 else many,
            intermediate=max(int(mlp) * wide // hidden, 1),
        )  # fmt: skip

    def refuse_misfit(self, policy: Any) -> None:
        """DraftError if this isn't for a policy of that transformers config, with all that differs."""
        text = policy.get_text_config()
        facts = {
            "model_type": (self.policy_type, text.model_type), "num_hidden_layers": (self.policy_layers, text.num_hidden_layers),
            "hidden_size": (self.hidden, text.hidden_size), "vocab_size": (self.vocabulary, text.vocab_size),
        }  # fmt: skip
        wrong = [f"{name} {own} (the policy has {its})" for name, (own, its) in facts.items() if own != its]
        if wrong:
            raise DraftError(f"the draft head is for another policy, of {', '.join(wrong)}; train one for this policy")

    def document(self) -> dict[str, Any]:
        """What config.json holds."""
        return {"model_type": KIND, **dataclasses.asdict(self)}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> HeadConfig:
        """What `document` has made; DraftError for anything else, with the key that is missing, unknown or of another type."""
        if document.get("model_type") != KIND:
            raise DraftError(f"config.json: model_type is {document.get('model_type')!r}; a draft head has {KIND!r}")
        values = {k: v for k, v in document.items() if k != "model_type"}
        kinds = {f.name: {"str": str, "int": int, "float": float}[str(f.type)] for f in dataclasses.fields(cls)}
        for name in sorted(kinds.keys() ^ values.keys()):
            raise DraftError(f"config.json: {name} is {'missing' if name in kinds else 'unknown to this version'}")
        for name, kind in kinds.items():
            if not isinstance(values[name], (int, float) if kind is float else kind) or isinstance(values[name], bool):
                raise DraftError(f"config.json: {name} is {values[name]!r}; it has to be of type {kind.__name__}")
        return cls(**values)
