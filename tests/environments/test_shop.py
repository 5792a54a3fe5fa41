"""The shop: its pages, WebShop's reward, and actions that it doesn't take."""

import random

import pytest

from rollart.environments.registry import make
from rollart.environments.shop import Goal, reward
from rollart.environments.shop_catalogue import Product, catalogue


def play(environment, seed):
    said, rng = [environment.reset(seed)], random.Random(seed)
    while True:
        result = environment.step(environment.script(rng))
        said += [result.observation, result.reward]
        if result.terminated or result.truncated:
            return said


def test_the_same_seed_is_the_same_episode_and_seeds_differ():
    assert play(make("shop"), 3) == play(make("shop"), 3)
    assert len({make("shop").reset(seed) for seed in range(30)}) > 25


def test_a_catalogue_repeats_with_its_seed_and_differs_between_seeds():
    assert catalogue.__wrapped__(1, 50).products == catalogue.__wrapped__(1, 50).products != catalogue.__wrapped__(2, 50).products


def test_skilled_play_earns_everything():
    assert [play(make("shop", script_skill=1.0), seed)[-1] for seed in range(50)] == [1.0] * 50


def test_an_episode_by_hand():
    shop = make("shop", goods=1)
    (product,) = catalogue(0, 1).products.values()
    asked = shop.reset(0)
    assert asked.endswith("\n[search]\n") and product.category in asked
    results = shop.step(f"search[{product.category}]").observation
    assert results == f"[b00000] {product.title}, ${product.cents / 100:.2f}\n[back to search]\n"
    item = shop.step("click[B00000]").observation
    assert item.startswith(f"{product.title}, $") and item.endswith("chosen none\n[back to search] [prev] [features] [buy now]\n")
    assert f"features: {', '.join(sorted(product.attributes))}" in shop.step("click[features]").observation
    assert shop.step("click[prev]").observation == results
    shop.step("click[b00000]")
    for value in shop.goal.options.values():
        assert f"chosen {value}" in shop.step(f"click[{value}]").observation
    bought = shop.step("click[buy now]")
    assert (bought.reward, bought.terminated, bought.info["bought"]) == (1.0, True, "b00000")


def good(title, category, cents=100, attributes=("soft", "warm")):
    return Product("x", title, category, cents, frozenset(attributes), {"size": ("s", "m")})


@pytest.mark.parametrize(
    ("bought", "options", "expected"),
    [
        (good("a b c d e", "hat"), {"size": "m"}, 1.0),
        (good("a b c d e", "hat"), {"size": "s"}, 3 / 4),
        (good("a b c d e", "hat", cents=201), {}, 2 / 4),
        (good("v w x y z", "hat", attributes=("soft",)), {"size": "m"}, 3 / 4),
        (good("a w x y z", "cap"), {"size": "m"}, 0.5),
        (good("v w x y z", "cap"), {"size": "m"}, 0.0),
        (good("a b x y z", "cap", attributes=()), {}, 1 / 4),
    ],
)
def test_the_reward_is_webshops(bought, options, expected):
    goal = Goal(good("a b c d e", "hat"), frozenset({"soft", "warm"}), {"size": "m"}, 200)
    assert reward(goal, bought, options) == pytest.approx(expected)


@pytest.mark.parametrize("action", ["", "click[buy now]", "click[]", "search", "search[", "x" * 100_000, "click[__class__]", "search[a]]; drop"])
def test_what_the_page_does_not_take_does_nothing_and_uses_a_turn(action):
    shop = make("shop", turns=2)
    shop.reset(1)
    result = shop.step(action)
    assert (result.observation, result.reward, result.info["valid"]) == ("nothing happens\n", 0.0, False)
    assert shop.step(action).truncated


@pytest.mark.parametrize("words", ["", '" OR goods MATCH "', "*", "NEAR(a b)", "'; DROP TABLE goods; --", "é", "code:b00001", "a" * 900])
def test_search_words_are_words_and_no_query_language(words):
    shop = make("shop")
    shop.reset(1)
    assert shop.step(f"search[{words}]").info["valid"]
    shop.reset(2)
    assert "[b0" in shop.step("search[yoga mat]").observation


def test_results_have_pages():
    shop = make("shop")
    shop.reset(0)
    first = shop.step("search[waterproof]").observation
    second = shop.step("click[next]").observation
    assert first != second and "[prev]" in second and "[prev]" not in first
    assert shop.step("click[prev]").observation == first
    assert shop.step("click[back to search]").observation == "[search]\n"
