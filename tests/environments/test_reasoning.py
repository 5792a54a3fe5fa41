"""Which families are allowed, and what a question and its entry look like."""

import json
import random

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS, ProceduralDataset

from rollart.environments import reasoning
from rollart.environments.reasoning import SAFE_FAMILIES, UnsafeFamily
from rollart.environments.registry import EnvironmentSettingsError, make
from rollart.sandbox.limits import SandboxMissing

DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def test_the_question_is_the_librarys_for_that_seed_and_the_entry_goes_to_info():
    entry = reasoning_gym.create_dataset("chain_sum", seed=17, size=1, **DIGITS)[0]
    environment = make("reasoning", family="chain_sum", config=DIGITS)
    assert environment.reset(17) == entry["question"]
    result = environment.step("whatever")
    assert (result.observation, result.reward, result.terminated) == ("", 0.0, True)
    assert result.info["entry"]["answer"] == entry["answer"]
    assert (result.info["family"], result.info["config"]) == ("chain_sum", DIGITS)


def test_only_the_shown_part_is_observed_where_the_expression_matches():
    whole = make("reasoning", config=DIGITS).reset(3)
    assert make("reasoning", config=DIGITS, shown="problem: (.*)").reset(3) == whole.split("problem: ")[1]
    assert make("reasoning", config=DIGITS, shown="nothing (.*)").reset(3) == whole


@pytest.mark.parametrize("shown", ["(", "no group", "(two)(groups)"])
def test_an_expression_without_exactly_one_group_is_refused(shown):
    with pytest.raises(EnvironmentSettingsError, match="shown"):
        make("reasoning", shown=shown)


def test_what_counts_of_a_response_is_the_last_match():
    whole = make("reasoning", config=DIGITS)
    whole.reset(3)
    assert "answer" not in whole.step("so 4 - 6 is -2.").info
    for expression in ("-?[0-9]+", "(-?[0-9]+)[.,]?"):
        environment = make("reasoning", config=DIGITS, answer=expression)
        environment.reset(3)
        found = [environment.step(text).info["answer"] for text in ("7", "so 4 - 6 is -2.", "no number", "")]
        assert found == ["7", "-2", "", ""]


@pytest.mark.parametrize("answer", ["(", "(two)(groups)"])
def test_an_expression_for_the_answer_with_several_groups_is_refused(answer):
    with pytest.raises(EnvironmentSettingsError, match="answer"):
        make("reasoning", answer=answer)


@pytest.mark.parametrize("family", sorted(SAFE_FAMILIES))
def test_every_allowed_family_makes_json_entries_and_scores_its_own_answer_one(family):
    environment = make("reasoning", family=family)
    assert environment.reset(1)
    info = json.loads(json.dumps(environment.step("x").info))
    scorer = reasoning_gym.create_dataset(family)
    assert scorer.score_answer(info["entry"]["answer"], info["entry"]) == 1.0


@pytest.mark.parametrize("family", [name for name, why in SAFE_FAMILIES.items() if "inherits" in why])
def test_families_listed_as_inheriting_the_base_scorer_still_do(family):
    assert DATASETS[family][0].score_answer is ProceduralDataset.score_answer


@pytest.mark.parametrize(
    "family", ["countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication", "coin_flip"]
)
def test_families_whose_scorer_evaluates_or_hangs_are_refused_where_there_is_no_sandbox(family, monkeypatch):
    def machine():
        raise SandboxMissing("bubblewrap is not installed")

    monkeypatch.setattr(reasoning, "machine", machine)
    with pytest.raises(UnsafeFamily, match=f"{family}.*sandbox: bubblewrap is not installed"):
        make("reasoning", family=family)


def test_a_family_that_does_not_exist_is_refused():
    with pytest.raises(UnsafeFamily, match="chain_sums"):
        make("reasoning", family="chain_sums")


@pytest.mark.parametrize(
    ("config", "word"), [({"seed": 3}, "seed"), ({"size": 3}, "size"), ({"max_term": 3}, "max_term"), ({"min_terms": 0}, "min_terms")]
)
def test_a_config_that_the_family_refuses_is_named(config, word):
    with pytest.raises(EnvironmentSettingsError, match=f"config.*{word}"):
        make("reasoning", config=config)


def test_scripted_play_is_right_as_often_as_its_skill_says():
    def rate(skill):
        right = 0
        for seed in range(300):
            environment = make("reasoning", config=DIGITS, script_skill=skill)
            environment.reset(seed)
            right += environment.script(random.Random(seed)) == environment.step("").info["entry"]["answer"]
        return right / 300

    assert rate(1.0) == 1.0
    assert 0.4 < rate(0.5) < 0.65
    assert rate(0.0) < 0.15
