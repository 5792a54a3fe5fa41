"""A small shop after WebShop (Yao et al., 2022, arXiv:2207.01206): owns its text pages, actions and reward; goods are made up."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field

from rollart.environments.protocol import StepResult
from rollart.environments.registry import Settings
from rollart.environments.shop_catalogue import Catalogue, Product, catalogue

PAGE = 5
"""Goods on a page of results."""

_ACTION = re.compile(r"(search|click)\[(.{0,1000})\]", re.DOTALL)


class ShopSettings(Settings):
    """`catalogue_seed` and `goods` make the catalogue, the same for every episode. `turns`: actions an episode may take.

    `script_skill`: chance that scripted play takes the action that leads to what is asked for; otherwise it takes any that the page has.
    """

    catalogue_seed: int = 0
    goods: int = Field(default=500, ge=1, le=50_000)
    turns: int = Field(default=15, ge=1)
    script_skill: float = Field(default=0.9, ge=0.0, le=1.0)


@dataclass(frozen=True, slots=True)
class Goal:
    """What a customer asks for: a good to start from, the attributes and options that count, and the price in cents not to go over."""

    product: Product
    attributes: frozenset[str]
    options: dict[str, str]
    cents: int

    def __str__(self) -> str:
        options = "".join(f", {name} {value}" for name, value in self.options.items())
        return f"I want {' and '.join(sorted(self.attributes))} {self.product.category}{options}, for at most ${self.cents / 100:.2f}"


def reward(goal: Goal, bought: Product, options: dict[str, str]) -> float:
    """WebShop's reward (section 3.1 of its paper), in [0, 1]:

        r = r_type * (|U_att & Y_att| + |U_opt & Y_opt| + [y_price <= u_price]) / (|U_att| + |U_opt| + 1)

    with r_type 0 if the titles have no word in common, 0.1 if under a tenth, 0.5 if at most a fifth and the kinds differ, else 1.
    Here a good is of the wanted kind or not, for which the paper compares its query and category.
    """
    wanted, has = set(goal.product.title.lower().split()), set(bought.title.lower().split())
    match, same_kind = len(wanted & has) / len(wanted), bought.category == goal.product.category
    r_type = 1.0 if same_kind else 0.0 if match == 0 else 0.1 if match < 0.1 else 0.5 if match <= 0.2 else 1.0
    right = len(goal.attributes & bought.attributes) + sum(options.get(name) == value for name, value in goal.options.items())
    return r_type * (right + (bought.cents <= goal.cents)) / (len(goal.attributes) + len(goal.options) + 1)


class Shop:
    """Find and buy what the instruction asks for: `search[words]` on the search page, `click[what]` for anything that a page shows in brackets.

    Reward comes with `click[buy now]`. Any other action does nothing and uses up a turn.
    """

    Settings: ClassVar[type[ShopSettings]] = ShopSettings

    def __init__(self, settings: ShopSettings | None = None) -> None:
        self.settings = settings or ShopSettings()
        self._goods: Catalogue = catalogue(self.settings.catalogue_seed, self.settings.goods)

    def reset(self, seed: int) -> str:
        rng = random.Random(seed)
        product = self._goods.products[rng.choice(sorted(self._goods.products))]
        options = {name: rng.choice(values) for name, values in product.options.items()}
        self.goal = Goal(product, product.attributes, options, product.cents + rng.randint(0, 2000))
        self._turn, self._found, self._page = 0, list[str](), 0
        self._item: Product | None = None
        self._chosen: dict[str, str] = {}
        self._details = False
        return f"{self.goal}\n{self._text()}"

    def step(self, action: str) -> StepResult:
        self._turn += 1
        found = _ACTION.fullmatch(action.strip()[:2000])
        kind, what = (found[1], found[2].strip().lower()) if found else ("", "")
        valid = (kind == "click" and what in self._buttons()) or (kind == "search" and not self._found and self._item is None)
        bought = self._item if valid and kind == "click" and what == "buy now" else None
        info: dict[str, Any] = {"turns": self._turn, "valid": valid}
        if bought is not None:
            info |= {"asked": str(self.goal), "bought": bought.code, "options": dict(self._chosen)}
            return StepResult("", reward(self.goal, bought, self._chosen), terminated=True, info=info)
        if valid and kind == "search":
            self._found, self._page = self._goods.search(what), 0
        elif valid:
            self._click(what)
        truncated = self._turn >= self.settings.turns
        return StepResult("" if truncated else self._text() if valid else "nothing happens\n", truncated=truncated, info=info)

    def close(self) -> None:
        """Nothing to give back: the catalogue is the process's."""

    def actions(self) -> list[str]:
        if not self._found and self._item is None:
            return [f"search[{self.goal.product.category}]"]
        return [f"click[{button}]" for button in self._buttons()]

    def script(self, rng: random.Random) -> str:
        """A step towards the good that is asked for, with probability `script_skill`; else any action of the page."""
        if rng.random() >= self.settings.script_skill:
            return rng.choice(self.actions())
        if self._item is None:
            if not self._found:
                return f"search[{self.goal.product.title}]"
            shown = self._shown()
            wanted = self.goal.product.code
            return f"click[{wanted if wanted in shown else shown[0]}]"
        missing = [value for name, value in self.goal.options.items() if self._chosen.get(name) != value and value in self._buttons()]
        return f"click[{missing[0] if missing else 'buy now'}]"

    def _click(self, what: str) -> None:
        if what == "back to search":
            self._item, self._found, self._chosen, self._details = None, [], {}, False
        elif self._item is None:
            if what in ("next", "prev"):
                self._page += 1 if what == "next" else -1
            else:
                self._item = self._goods.products[what]
        elif what == "prev":
            self._item, self._chosen, self._details = None, {}, False
        elif what == "features":
            self._details = True
        else:
            self._chosen |= {name: what for name, values in self._item.options.items() if what in values}

    def _shown(self) -> list[str]:
        return self._found[self._page * PAGE : (self._page + 1) * PAGE]

    def _buttons(self) -> list[str]:
        if self._item is not None:
            values = [value for values in self._item.options.values() for value in values]
            return ["back to search", "prev", *values, "features", "buy now"]
        if not self._found:
            return []
        more = ["next"] if (self._page + 1) * PAGE < len(self._found) else []
        return ["back to search", *(["prev"] if self._page else []), *more, *self._shown()]

    def _text(self) -> str:
        if (item := self._item) is not None:
            lines = [f"{item.title}, ${item.cents / 100:.2f}"]
            lines += [
                f"{name}: {' '.join(f'[{v}]' for v in values)}, chosen {self._chosen.get(name, 'none')}" for name, values in item.options.items()
            ]
            lines += [f"features: {', '.join(sorted(item.attributes))}"] if self._details else []
            return "\n".join([*lines, "[back to search] [prev] [features] [buy now]"]) + "\n"
        if not self._found:
            return "[search]\n"
        goods = [self._goods.products[code] for code in self._shown()]
        buttons = " ".join(f"[{button}]" for button in self._buttons() if button not in self._shown())
        return "\n".join([*(f"[{p.code}] {p.title}, ${p.cents / 100:.2f}" for p in goods), buttons]) + "\n"
