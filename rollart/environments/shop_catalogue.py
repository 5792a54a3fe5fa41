"""A made-up catalogue of goods, the same for the same seed and size, with a search over it by SQLite's FTS5 (ranked by BM25)."""

from __future__ import annotations

import random
import re
import sqlite3
import threading
from dataclasses import dataclass
from functools import lru_cache

CATEGORIES: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "running shoes": (("lightweight", "waterproof", "non slip", "wide fit"), {"colour": ("black", "red", "blue"), "size": ("7", "8", "9", "10")}),
    "office chair": (("ergonomic", "adjustable", "heavy duty", "easy clean"), {"colour": ("black", "grey", "white")}),
    "table lamp": (("dimmable", "energy saving", "touch control", "wood base"), {"colour": ("white", "brass", "green")}),
    "green tea": (
        ("organic", "caffeine free", "fair trade", "sugar free"),
        {"flavour": ("mint", "lemon", "jasmine"), "pack": ("20 bag", "50 bag")},
    ),
    "bluetooth speaker": (("waterproof", "long battery", "hands free", "stereo sound"), {"colour": ("black", "blue", "red")}),
    "backpack": (("waterproof", "lightweight", "laptop pocket", "anti theft"), {"colour": ("grey", "green", "black"), "volume": ("20 l", "30 l")}),
    "face cream": (("fragrance free", "cruelty free", "paraben free", "long lasting"), {"volume": ("30 ml", "50 ml", "100 ml")}),
    "cotton shirt": (
        ("long sleeve", "machine wash", "slim fit", "stretch"),
        {"colour": ("white", "blue", "pink"), "size": ("s", "m", "l", "xl")},
    ),
    "coffee maker": (("stainless steel", "easy clean", "programmable", "bpa free"), {"colour": ("black", "silver")}),
    "yoga mat": (("non slip", "eco friendly", "extra thick", "latex free"), {"colour": ("purple", "green", "blue"), "length": ("180 cm", "200 cm")}),
}
"""What is sold: attributes that goods of a kind may have, and the options that a buyer chooses."""

BRANDS = ("Alder", "Birch", "Cedar", "Dunlin", "Egret", "Fennel", "Gannet", "Heron", "Ibis", "Juniper")


@dataclass(frozen=True, slots=True)
class Product:
    """A good: its code, title, kind, price in cents, attributes (a part of which its title names), and options with their values."""

    code: str
    title: str
    category: str
    cents: int
    attributes: frozenset[str]
    options: dict[str, tuple[str, ...]]


class Catalogue:
    """Goods by their code, and a search over titles and kinds; one for all episodes of a process."""

    def __init__(self, seed: int, size: int) -> None:
        rng = random.Random(seed)
        self.products = {product.code: product for product in (_made(rng, number) for number in range(size))}
        self._lock = threading.Lock()
        self._rows = sqlite3.connect(":memory:", check_same_thread=False)
        self._rows.execute("CREATE VIRTUAL TABLE goods USING fts5(code UNINDEXED, words, tokenize='porter')")
        words = ((p.code, " ".join((p.title, p.category, *sorted(p.attributes)))) for p in self.products.values())
        self._rows.executemany("INSERT INTO goods VALUES (?, ?)", words)

    def search(self, text: str, most: int = 50) -> list[str]:
        """Codes of what has any of the words, best first. Of a text, its first twenty words of letters and digits count."""
        words = re.findall(r"[a-z0-9]+", text[:1000].lower())[:20]
        if not words:
            return []
        wanted = " OR ".join(f'"{word}"' for word in words)
        with self._lock:
            found = self._rows.execute("SELECT code FROM goods WHERE goods MATCH ? ORDER BY bm25(goods), rowid LIMIT ?", (wanted, most))
            return [code for (code,) in found]


def _made(rng: random.Random, number: int) -> Product:
    category = rng.choice(sorted(CATEGORIES))
    possible, options = CATEGORIES[category]
    attributes = rng.sample(possible, rng.randint(1, 3))
    title = f"{rng.choice(BRANDS)} {attributes[0]} {category} {rng.randint(100, 999)}"
    return Product(f"b{number:05}", title, category, rng.randint(500, 9900), frozenset(attributes), dict(options))


@lru_cache(maxsize=4)
def catalogue(seed: int, size: int) -> Catalogue:
    """The catalogue of that seed and size, made once a process."""
    return Catalogue(seed, size)
