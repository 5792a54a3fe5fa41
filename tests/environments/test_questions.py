"""A user's own questions: GSM8K's format, splits, Parquet, and files with bad lines."""

import json
import random

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollart.environments.question_file import MAX_LINE, is_held_out
from rollart.environments.questions import same
from rollart.environments.registry import EnvironmentSettingsError, make

ROWS = [{"question": f"What is {n} plus {n}?", "answer": f"Add them: {n}+{n}={2 * n}\n#### {2 * n}"} for n in range(200)]


@pytest.fixture(params=["jsonl", "parquet"])
def url(request, tmp_path):
    path = tmp_path / f"sums.{request.param}"
    if request.param == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=30)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def asked(url, split, seeds=range(400), **settings):
    environment = make("questions", url=url, split=split, **settings)
    return [environment.reset(seed).strip() for seed in seeds]


def test_an_episode_by_hand_in_gsm8ks_format(url):
    environment = make("questions", url=url)
    question = environment.reset(7)
    number = int(question.split()[2])
    result = environment.step(f"so it is\n#### {2 * number}")
    assert (result.reward, result.terminated, result.observation) == (1.0, True, "")
    assert result.info == {
        "question": question.strip(), "solution": ROWS[number]["answer"], "expected": str(2 * number), "answer": str(2 * number),
    }  # fmt: skip
    environment.reset(7)
    assert environment.step(f"{2 * number}").reward == 1.0
    assert environment.step(f"{2 * number + 1}").reward == 0.0


def test_a_seed_is_a_question_and_seeds_differ(url):
    assert asked(url, "training") == asked(url, "training")
    assert len(set(asked(url, "training"))) > 100


def test_held_out_questions_are_never_asked_in_training_whatever_their_order(url, tmp_path):
    training, held_out = set(asked(url, "training", held_out=0.3)), set(asked(url, "held_out", held_out=0.3))
    assert held_out and training and not training & held_out
    assert all(is_held_out(q, 0.3) for q in held_out)
    shuffled = tmp_path / "shuffled.jsonl"
    rows = random.Random(0).sample(ROWS, len(ROWS))
    shuffled.write_text("".join(json.dumps({**row, "question": row["question"].upper()}) + "\n\n" for row in rows))
    again = {q.capitalize() for q in asked(str(shuffled), "held_out", held_out=0.3)}
    assert not {q.lower() for q in again} & {q.lower() for q in training}


def test_a_file_in_memory_with_fields_of_other_names_is_read_too():
    with fsspec.open("memory://questions/own.jsonl", "w") as file:
        file.write('{"prompt": "Capital of France?", "gold": "Paris"}\n{"prompt": "6 times 7?", "gold": 42}\n')
    environment = make("questions", url="memory://questions/own.jsonl", question="prompt", answer="gold", split="all")
    said = {environment.reset(seed): (environment.step("paris ").reward, environment.step("42.0").reward) for seed in range(20)}
    assert said == {"Capital of France?\n": (1.0, 0.0), "6 times 7?\n": (0.0, 1.0)}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{oops", r"bad\.jsonl:3: no JSON object"),
        ("[1, 2]", r"bad\.jsonl:3: no JSON object, but list"),
        ('{"question": "q"}', r"bad\.jsonl:3: no field 'answer'; it has question"),
        ('{"question": "q", "answer": null}', r"bad\.jsonl:3: field 'answer' is no text or number"),
        ('{"question": " ", "answer": "1"}', r"bad\.jsonl:3: field 'question'"),
        ("[" * 100_000, r"bad\.jsonl:3: no JSON object"),
        ('"' + "x" * MAX_LINE + '"', r"bad\.jsonl:3: the line has over"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(line, says, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{json.dumps(ROWS[0])}\n\n{line}\n")
    with pytest.raises(EnvironmentSettingsError, match=says):
        make("questions", url=str(path))


def test_a_file_that_is_missing_empty_or_none_of_its_kind_is_refused(tmp_path):
    with pytest.raises(EnvironmentSettingsError, match=r"nothing\.jsonl cannot be read: FileNotFoundError"):
        make("questions", url=str(tmp_path / "nothing.jsonl"))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(EnvironmentSettingsError, match="no question in the split 'training'"):
        make("questions", url=str(tmp_path / "empty.jsonl"))
    (tmp_path / "text.parquet").write_text("no parquet at all")
    with pytest.raises(EnvironmentSettingsError, match=r"text\.parquet: no Parquet file"):
        make("questions", url=str(tmp_path / "text.parquet"))
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(EnvironmentSettingsError, match="columns are a, not question and answer"):
        make("questions", url=str(tmp_path / "other.parquet"))


@pytest.mark.parametrize(
    ("answer", "expected", "equal"),
    [
        ("1,000", "1000", True), ("$5.0", "5", True), ("-3", "3", False), ("50%", "50", True), ("7.", "7", True), ("two words", "Two  WORDS", True),
        ("", "5", False), ("1e9", "1000000000", False), ("٥", "5", False), ("9" * 100_000, "9", False), ("NaN", "nan", True), ("1,00", "100", False),
    ],
)  # fmt: skip
def test_answers_compare_as_numbers_or_as_words(answer, expected, equal):
    assert same(answer, expected) is equal
