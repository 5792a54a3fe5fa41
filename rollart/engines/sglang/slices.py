"""Which part of each parameter a rank of a tensor-parallel SGLang server holds, under which name, and how a rank reads it; sends none to a server.

The rules are those of SGLang's parallel layers for Llama and Qwen (2, 2.5 and 3), which `tests/engines/sglang/test_slices.py` holds them against.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from storage.format.dtypes import TORCH_OF
from storage.version import Version
from storage.weights import WeightStore

__all__ = ["Part", "Shape", "UnknownLayout", "parts_of", "pull_rank", "rank_of"]

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
PADDING = 64
"""SGLang pads a vocabulary to a multiple of it; to one of it times the ranks where that is not divisible among them."""

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
MERGED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""Projections that stand below each other in one of SGLang's parameters, and in which order."""

CROSSING = ("o_proj", "down_proj")
"""Projections whose columns are divided, since what they read is; their sum over the ranks is the output, and each has all of the bias."""

_PROJECTION = re.compile(r"(?P<before>.*\.)(?P<projection>[a-z_]+_proj)(?P<kind>\.weight|\.bias)")


class UnknownLayout(ValueError):
    """How SGLang divides this model among ranks is not known here, or it can't be divided so; the message says which and what to do."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model's config decides who holds what: numbers of heads, rows of the vocabulary, and whether the LM head is the embedding."""

    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """From `config.json`. UnknownLayout for an architecture that is none of `ARCHITECTURES`."""
        names = config.get("architectures") or ["none"]
        if names[0] not in ARCHITECTURES:
            raise UnknownLayout(f"architecture {names[0]} is none of {', '.join(ARCHITECTURES)}; send its tensors whole, and SGLang divides them")
        heads = int(config["num_attention_heads"])
        tied = bool(config.get("tie_word_embeddings", False))
        return cls(heads, int(config.get("num_key_value_heads") or heads), int(config["vocab_size"]), tied)


@dataclass(frozen=True, slots=True)
class Part:
    """[start, end) of dimension `axis` of the tensor `name` stands in SGLang's parameter `into`, there as rows from `row` on of `rows`; the rest
    of these, the padding of a vocabulary, is 0. `axis` 1 leaves the rows as they are."""

    name: str
    axis: int
    start: int
    end: int
    into: str
    row: int
    rows: int

    @property
    def cut(self) -> slice | tuple[slice, slice]:
        """As between the brackets of the tensor."""
        wanted = slice(self.start, self.end)
        return wanted if self.axis == 0 else (slice(None), wanted)


def parts_of(shapes: Mapping[str, Sequence[int]], shape: Shape, rank: int, ranks: int) -> list[Part]:
    """What rank `rank` of `ranks` holds of the tensors with these shapes, by name as in a Hugging Face checkpoint.

    UnknownLayout for a tensor that is none of the architecture's, or one that so many ranks can't divide.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is none of {ranks}")
    known = set(shapes)
    alone = [_part(name, shapes[name], shape, rank, ranks) for name in shapes if not _is_other_name(name, known, shape)]
    placed: list[Part] = []
    for into in dict.fromkeys(part.into for part in alone):
        together = sorted((part for part in alone if part.into == into), key=lambda part: part.row)
        row, rows = 0, sum(part.rows for part in together)
        for part in together:
            placed.append(Part(part.name, part.axis, part.start, part.end, into, row, rows))
            row += part.rows
    return placed


def rank_of(tensors: Mapping[str, Tensor], shape: Shape, rank: int, ranks: int) -> dict[str, Tensor]:
    """SGLang's parameters of one rank, cut out of whole tensors: views of these where nothing is merged or padded."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    found: dict[str, Tensor] = {}
    for into, parts in _by_parameter(parts_of(shapes, shape, rank, ranks)):
        cuts = [tensors[part.name][part.cut] for part in parts]
        if len(cuts) == 1 and cuts[0].shape[0] == parts[0].rows:
            found[into] = cuts[0]
            continue
        found[into] = _empty(parts, [cut.shape for cut in cuts], cuts[0])
        for part, cut in zip(parts, cuts, strict=True):
            found[into][part.row : part.row + cut.shape[0]] = cut
    return found


def pull_rank(store: WeightStore, version: Version, shape: Shape, rank: int, ranks: int) -> dict[str, Tensor]:
    """SGLang's parameters of one rank, read from the store without the other ranks' rows: each part goes straight to its place.

    Columns cost their rows' bytes, as always in the store: of `o_proj` and `down_proj` each rank reads all. Raises what `pull` does, and
    UnknownLayout.
    """
    entries = store.commit(version).tensors
    parts = parts_of({name: entry.shape for name, entry in entries.items()}, shape, rank, ranks)
    found: dict[str, Tensor] = {}
    out: dict[str, Tensor] = {}
    for into, together in _by_parameter(parts):
        sizes = [_cut(entries[part.name].shape, part) for part in together]
        found[into] = _empty(together, sizes, torch.empty(0, dtype=TORCH_OF[entries[together[0].name].dtype]))
        for part, size in zip(together, sizes, strict=True):
            out[part.name] = found[into][part.row : part.row + size[0]]
    store.pull(version, names=list(out), slices={part.name: part.cut for part in parts}, out=out)
    return found


def _part(name: str, size: Sequence[int], shape: Shape, rank: int, ranks: int) -> Part:
    """Alone in its parameter, with `row` the place among those that it is merged with."""
    if name in (EMBEDDING, LM_HEAD):
        return _of_vocabulary(name, shape, rank, ranks)
    found = _PROJECTION.fullmatch(name)
    if found is None:
        if not name.endswith("norm.weight"):
            raise UnknownLayout(f"{name} is no parameter of {', '.join(ARCHITECTURES)}; send the tensors whole, and SGLang divides them")
        return Part(name, 0, 0, size[0], name, 0, size[0])
    before, projection, kind = found.group("before", "projection", "kind")
    if projection in CROSSING:
        if kind == ".bias":
            return Part(name, 0, 0, size[0], name, 0, size[0])
        start, end = _share(name, size[1], rank, ranks)
        return Part(name, 1, start, end, name, 0, size[0])
    if projection not in MERGED:
        raise UnknownLayout(f"{name} is no parameter of {', '.join(ARCHITECTURES)}; send the tensors whole, and SGLang divides them")
    merged, place = MERGED[projection]
    if projection in ("k_proj", "v_proj"):
        start, end = _kv_share(name, size[0], shape, rank, ranks)
    elif projection == "q_proj":
        first, last = _share(f"{name}: its heads", shape.heads, rank, ranks)
        start, end = (head * (size[0] // shape.heads) for head in (first, last))
    else:
        start, end = _share(name, size[0], rank, ranks)
    return Part(name, 0, start, end, f"{before}{merged}{kind}", place, end - start)


def _share(what: str, size: int, rank: int, ranks: int) -> tuple[int, int]:
    if size % ranks:
        raise UnknownLayout(f"{what} ({size}) can't be divided among {ranks} ranks; choose another engine.sglang.tensor_parallel")
    return rank * size // ranks, (rank + 1) * size // ranks


def _kv_share(name: str, size: int, shape: Shape, rank: int, ranks: int) -> tuple[int, int]:
    """With more ranks than heads several ranks in a row have the same head."""
    if ranks <= shape.kv_heads:
        first, last = _share(f"{name}: its heads", shape.kv_heads, rank, ranks)
    else:
        if ranks % shape.kv_heads:
            raise UnknownLayout(f"{name}: {ranks} ranks can't share {shape.kv_heads} heads evenly; choose another engine.sglang.tensor_parallel")
        first = rank // (ranks // shape.kv_heads)
        last = first + 1
    head = size // shape.kv_heads
    return first * head, last * head


def _of_vocabulary(name: str, shape: Shape, rank: int, ranks: int) -> Part:
    padding = PADDING if _padded(shape.vocabulary, PADDING) % ranks == 0 else PADDING * ranks
    rows = _padded(shape.vocabulary, padding) // ranks
    start, end = (min(at * rows, shape.vocabulary) for at in (rank, rank + 1))
    return Part(name, 0, start, end, EMBEDDING if shape.tied else name, 0, rows)


def _padded(size: int, to: int) -> int:
    return -(-size // to) * to


def _is_other_name(name: str, known: set[str], shape: Shape) -> bool:
    """A tied LM head is SGLang's embedding, whichever of the two names a checkpoint has."""
    return name == LM_HEAD and shape.tied and EMBEDDING in known


def _by_parameter(parts: Sequence[Part]) -> Iterator[tuple[str, list[Part]]]:
    for into in dict.fromkeys(part.into for part in parts):
        yield into, [part for part in parts if part.into == into]


def _cut(whole: Sequence[int], part: Part) -> tuple[int, ...]:
    """The shape of what is cut out of a tensor of shape `whole`."""
    size = list(whole)
    size[part.axis] = part.end - part.start
    return tuple(size)


def _empty(parts: Sequence[Part], sizes: Sequence[Sequence[int]], like: Tensor) -> Tensor:
    """SGLang's parameter, of zeros where it has more rows than its parts."""
    made = like.new_empty((parts[0].rows, *sizes[0][1:]))
    filled = parts[-1].row + sizes[-1][0]
    made[filled:] = 0
    return made
