"""The tiny policy: its tokenizer round-trips, its folder is a plain Hugging Face one, its weights follow from the seed."""

import random
import string

import pytest
import torch

from rollart.policy import PolicyError, build_policy, init_model, load_config, load_tokenizer, train_tokenizer

TEXTS = ["guess 1 to 9\n", "above 3\n", "below 8\n", "@.#.\n....\n.#..\n...*\n|.#.\n", "L", "D", "R", "U", "4 - 1 =", "42"] * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_policy(tmp_path_factory.mktemp("policy"), TEXTS, hidden=32, layers=2, heads=4, feed_forward=64, context=128)


def test_digits_cells_letters_and_known_words_are_single_tokens(folder):
    tokenizer = load_tokenizer(folder)
    for text, count in {"7": 1, "42": 2, "@.#.\n": 5, "R": 1, "guess": 1, " to": 1, "above 3\n": 4}.items():
        assert len(tokenizer(text)["input_ids"]) == count, text


def test_any_text_round_trips_and_special_tokens_are_dropped(folder):
    tokenizer, rng = load_tokenizer(folder), random.Random(0)
    for text in ["", " ", "naïve 漢字 🙂\r\n\t", "a  b ", *("".join(rng.choices(string.printable, k=30)) for _ in range(50))]:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_equal_texts_give_an_equal_tokenizer():
    assert train_tokenizer(TEXTS).get_vocab() == train_tokenizer(TEXTS).get_vocab()


def test_padding_and_end_are_two_tokens_that_the_config_names(folder):
    tokenizer, config = load_tokenizer(folder), load_config(folder)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (config.pad_token_id, config.eos_token_id) == (0, 1)
    assert config.vocab_size >= len(tokenizer) and config.vocab_size % 8 == 0


def test_the_vocabulary_is_rounded_up_to_a_multiple_of_eight(tmp_path):
    assert load_config(build_policy(tmp_path, TEXTS, vocab=258, hidden=16, layers=1, heads=2, feed_forward=16)).vocab_size == 264


def test_weights_follow_from_the_seed_alone(folder):
    config = load_config(folder)
    before = torch.get_rng_state()
    one, same, other = (init_model(config, seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(one[k], same[k]) for k in one)
    assert any(not torch.equal(one[k], other[k]) for k in one)
    assert all(v.dtype is torch.float32 for v in one.values())


def test_the_model_reads_its_tokenizers_ids(folder):
    ids = torch.tensor([load_tokenizer(folder)(TEXTS[3])["input_ids"]])
    logits = init_model(load_config(folder), 0)(ids).logits
    assert logits.shape == (1, ids.shape[1], load_config(folder).vocab_size) and torch.isfinite(logits).all()


def test_what_is_no_policy_folder_is_named(tmp_path):
    for load in (load_config, load_tokenizer):
        with pytest.raises(PolicyError, match=str(tmp_path)):
            load(tmp_path)


def test_impossible_widths_are_refused(tmp_path):
    with pytest.raises(PolicyError, match="hidden is 30"):
        build_policy(tmp_path / "p", TEXTS, hidden=30, heads=4)
    with pytest.raises(PolicyError, match="vocab is 100"):
        train_tokenizer(TEXTS, vocab=100)
    assert not (tmp_path / "p").exists()
