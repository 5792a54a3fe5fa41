"""The policy: where it comes from."""

from __future__ import annotations

from pydantic import Field, model_validator

from rollart.config.section import Section


class TinyPolicy(Section):
    """A small Llama-shaped policy and its tokenizer, made here from nothing."""

    vocab: int = Field(512, ge=258, description="most tokens of the tokenizer; 256 bytes and two special ones are the least")
    hidden_size: int = Field(128, ge=16, multiple_of=8, description="width of the residual stream")
    layers: int = Field(4, ge=1, description="decoder layers")
    heads: int = Field(4, ge=1, description="attention heads")
    intermediate_size: int = Field(352, ge=16, description="width of the feed-forward layer")
    max_length: int = Field(512, ge=32, description="positions, in tokens")

    @model_validator(mode="after")
    def _pairs(self) -> TinyPolicy:
        if self.hidden_size % (2 * self.heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} is no multiple of {2 * self.heads}, twice the heads, since rotary positions work on pairs: "
                "change hidden_size or heads"
            )
        return self


class PolicySettings(Section):
    """The policy: a Hugging Face folder, a version that another run published, a GGUF file, or a tiny one built here."""

    model: str | None = Field(
        None,
        description="a Hugging Face causal language model: its folder or URL (config, tokenizer, safetensors), or `URL@VERSION` of weights, or "
        "the path or URL of a `.gguf` file, or `package:NAME` for the one in an installed Python package (`rollart[smollm2]` reads them)",
    )
    tiny: TinyPolicy | None = Field(None, description="build a small policy instead")
    chat: bool = Field(
        False, description="observations and responses are messages of the model's chat template; else they follow each other as they are"
    )

    @model_validator(mode="after")
    def _one_source(self) -> PolicySettings:
        if (self.model is None) == (self.tiny is None):
            raise ValueError("give one of policy.model and policy.tiny (`tiny: {}` builds one of the default size)")
        if self.chat and self.tiny is not None:
            raise ValueError("policy.tiny has no chat template: set policy.chat to false")
        return self
