"""`rollart env list` and `rollart env try`, as a user calls them, with served policies behind real HTTP servers."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from click.testing import CliRunner

from benchmarks.byte_policy import byte_policy
from rollart.cli import main
from rollart.environments.catalogue import SHIPPED, Entry
from rollart.rollout.vocabulary import Vocabulary


def env(*arguments: str, stdin: str | None = None):
    return CliRunner().invoke(main, ["env", *arguments], input=stdin)


class Answering(BaseHTTPRequestHandler):
    """Guesses 5 in either protocol, and keeps what it was asked."""

    asked: ClassVar[list[dict]] = []
    five: ClassVar[list[int]] = []

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "five"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if self.path == "/generate":
            self._answer({"output_ids": self.five, "text": "5"})
        elif self.path == "/v1/chat/completions":
            self._answer({"choices": [{"message": {"content": "5"}}]})
        else:
            self._answer({"odd": True})

    def _answer(self, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments) -> None: ...


@pytest.fixture
def served() -> Iterator[str]:
    Answering.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_list_has_a_line_for_each_with_how_to_install_what_lacks(monkeypatch):
    monkeypatch.setitem(SHIPPED, "lunar", Entry("lunar", "a:B", extra="lunar", needs=("lunar_lib_of_nobody",)))
    lines = env("list").output.splitlines()
    assert len(lines) >= len(SHIPPED)
    assert any(line.split() == ["guess_number", "rollart", "installed"] for line in lines)
    assert any(line.startswith("lunar ") and line.endswith("needs lunar_lib_of_nobody: pip install 'rollart[lunar]'") for line in lines)


def test_a_scripted_episode_is_shown_turn_by_turn():
    done = env("try", "frozen_lake", "--set", "settings.size=2", "--set", "settings.frozen=1.0", "--set", "settings.script_skill=1.0")
    assert done.exit_code == 0
    assert "observation: @.\n             .*\n" in done.output
    assert done.output.endswith("--- terminated after 2 turns, reward 1\n")


def test_random_play_repeats_with_its_seed_and_episodes_follow_it():
    once, again = (env("try", "guess_number", "--policy", "random", "--seed", "3", "--episodes", "2").output for _ in range(2))
    assert once == again
    assert "--- episode, seed 3" in once and "--- episode, seed 4" in once


def test_a_person_plays_over_the_standard_input():
    done = env("try", "guess_number", "--policy", "human", "--set", "settings.turns=2", stdin="five\n9\n")
    assert done.exit_code == 0
    assert "observation: invalid" in done.output and "after 2 turns" in done.output


@pytest.mark.parametrize("path", ["/v1", ""])
def test_a_served_policy_plays_in_either_protocol(path, served, tmp_path, monkeypatch):
    folder = byte_policy(tmp_path / "policy")
    vocabulary = Vocabulary(folder)
    monkeypatch.setattr(Answering, "five", [*vocabulary.encode("5"), vocabulary.eos_ids[0]])
    done = env("try", "guess_number", "--policy", served + path, "--tokenizer", str(folder), "--set", "settings.turns=1", "--seed", "1")
    assert done.exit_code == 0, done.output
    assert "action:      5" in done.output
    (asked,) = Answering.asked
    if path:
        assert asked["model"] == "five" and asked["messages"] == [{"role": "user", "content": "guess 1 to 9\n"}]
    else:
        assert vocabulary.decode(asked["input_ids"]) == "guess 1 to 9\n"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["nothing"], 2, "unknown environment 'nothing'"),
        (["guess_number", "--policy", "clever"], 2, "--policy clever: write scripted, random, human or a URL"),
        (["guess_number", "--set", "turns=3"], 2, "--set turns=3: write settings.NAME=VALUE"),
        (["guess_number", "--set", "settings.turns=0"], 2, "turns: Input should be greater than or equal to 1"),
        (["guess_number", "--policy", "http://127.0.0.1:1"], 2, "--tokenizer: an engine takes tokens"),
        (["builtins:dict"], 2, "is no environment class"),
    ],
)
def test_misuse_ends_in_one_clear_line(arguments, code, says):
    done = env("try", *arguments)
    assert done.exit_code == code
    (line,) = [line for line in done.output.splitlines() if line.startswith("rollart: ")]
    assert says in line


def test_a_served_policy_that_is_not_there_or_answers_oddly_fails_the_try(served):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        assert env("try", "guess_number", "--policy", url).exit_code == 3
    done = env("try", "guess_number", "--policy", f"{served}/odd/v1", "--model", "m")
    assert done.exit_code == 3 and "something else than its protocol says: KeyError" in done.output


def test_json_puts_one_object_on_the_last_line():
    done = env("try", "frozen_lake", "--set", "settings.script_skill=1.0", "--json")
    said = json.loads(done.output.splitlines()[-1])
    assert said["ok"] and said["episodes"][0]["reward"] == 1.0
