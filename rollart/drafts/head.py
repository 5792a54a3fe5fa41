"""A head on the policy's hidden states that proposes tokens: its arithmetic only. Knows no engine, no trainer and no KV cache.

After EAGLE (Li et al. 2024, arXiv 2401.15077): one decoder layer goes on with the policy's last hidden states, so that it needs no layers of its
own to understand the text. At place t it reads the policy's last hidden state h_t (after its final norm: what its LM head reads) and the
policy's own embedding of the token x_{t+1} that was sampled from it, and makes a feature g_{t+1}. That gives the distribution of x_{t+2}, and stands
for h_{t+1} at the next place where the policy has not been asked yet. As in EAGLE-3 (Li et al. 2025, arXiv 2503.01840) both inputs are
normalised, the vocabulary may be a part of the policy's, and the head may be trained on its own features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from rollart.drafts.config import HeadConfig
from rollart.drafts.errors import DraftError

__all__ = ["Attend", "DraftHead", "causal"]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query [B, heads, N, dim], key [B, kv_heads, N, dim], value [B, kv_heads, N, dim]) -> [B, heads, N, dim], scaled by dim ** -0.5.

Query and key are rotated already. Whoever calls the head decides by this what a place sees: entries of a cache, of a padded or a packed batch,
or of earlier steps of the same multi-step draft.
"""


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each place sees those up to its own, of whole sequences without padding on their left."""
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])


class DraftHead(nn.Module):
    """Sizes are those of `config`; `kept` int64 [R] are the ids, ascending, of the policy's tokens that it can propose (none: the first R).

    DraftError if `kept` isn't that. The policy's embedding is no part of it: embeddings are handed in.
    """

    kept: Tensor

    def __init__(self, config: HeadConfig, kept: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        hidden, width = config.hidden, config.width
        self.register_buffer("kept", torch.arange(config.kept) if kept is None else kept.to(torch.int64))
        refuse_wrong_kept(self.kept, config)
        self.hidden_norm = nn.RMSNorm(hidden, config.norm_eps)
        self.embedding_norm = nn.RMSNorm(hidden, config.norm_eps)
        self.fc = nn.Linear(2 * hidden, width, bias=False)
        self.attention_norm = nn.RMSNorm(width, config.norm_eps)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, config.norm_eps)
        self.gate_proj = nn.Linear(width, config.intermediate, bias=False)
        self.up_proj = nn.Linear(width, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, width, bias=False)
        self.norm = nn.RMSNorm(width, config.norm_eps)
        self.out_proj = nn.Linear(width, hidden, bias=False) if width != hidden else nn.Identity()
        self.lm_head = nn.Linear(hidden, config.kept, bias=False)

    def forward(self, hidden: Tensor, embeddings: Tensor, positions: Tensor, attend: Attend = causal) -> Tensor:
        """The features g_{t+1} [B, N, H] of places t = `positions` int64 [B, N], from `hidden` [B, N, H], each h_t or the feature that stands
        for it, and `embeddings` [B, N, H], the policy's of x_{t+1}."""
        x = self.fc(torch.cat([self.hidden_norm(hidden), self.embedding_norm(embeddings)], -1))
        x = x + self._attention(self.attention_norm(x), positions, attend)
        y = self.mlp_norm(x)
        x = x + self.down_proj(silu(self.gate_proj(y)) * self.up_proj(y))
        features: Tensor = self.out_proj(self.norm(x))
        return features

    def logits(self, features: Tensor) -> Tensor:
        """The logits [..., R] of `kept`, the tokens x_{t+2}, from features g_{t+1} [..., H]."""
        logits: Tensor = self.lm_head(features)
        return logits

    @torch.no_grad()
    def start_from(self, output: Tensor) -> None:
        """Takes the rows of `kept` over from the policy's LM head, `output` [V, H]: then features need only resemble hidden states."""
        wanted = (self.config.vocabulary, self.config.hidden)
        if tuple(output.shape) != wanted:
            raise DraftError(f"the policy's LM head has shape {tuple(output.shape)}; the draft head wants {wanted}")
        self.lm_head.weight.copy_(output[self.kept.to(output.device)])

    def _attention(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        batch, places = x.shape[:2]
        q, k, v = (
            projected.view(batch, places, -1, self.config.head_dim).transpose(1, 2) for projected in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        cos, sin = self._rotation(positions, x.dtype)
        mixed: Tensor = self.o_proj(attend(_rotated(q, cos, sin), _rotated(k, cos, sin), v).transpose(1, 2).reshape(batch, places, -1))
        return mixed

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, 1, N, dim] of rotary positions (Su et al. 2021, arXiv 2104.09864), halves rotated as in Llama."""
        dim = self.config.head_dim
        frequencies = self.config.rope_theta ** -(torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
        angles = (positions.float().unsqueeze(-1) * frequencies).repeat(1, 1, 2).unsqueeze(1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def refuse_wrong_kept(kept: Tensor, config: HeadConfig) -> None:
    """DraftError unless `kept` are `config.kept` ascending ids of the policy's."""
    if tuple(kept.shape) != (config.kept,) or kept.dtype != torch.int64:
        raise DraftError(f"kept has shape {tuple(kept.shape)} of {kept.dtype}; it has to be int64 of shape ({config.kept},)")
    if bool((kept[1:] <= kept[:-1]).any()) or int(kept[0]) < 0 or int(kept[-1]) >= config.vocabulary:
        raise DraftError(f"kept has to ascend, without a token twice, within the policy's vocabulary of {config.vocabulary}")


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
