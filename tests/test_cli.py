"""The command line from outside: what bad input ends in, what a dry run says, and that nothing is left behind."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROLLART = [sys.executable, "-m", "rollart"]


def rollart(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([*ROLLART, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=110, check=False)


def one_line(done: subprocess.CompletedProcess[str], code: int = 2) -> str:
    assert done.returncode == code, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("rollart: "), done.stderr
    return lines[0]


def test_a_dry_run_prints_the_resolved_configuration_and_starts_nothing(tmp_path: Path) -> None:
    done = rollart("run", "train", "--dry-run", "--set", "train.steps=7", "--set", "run.dashboard_port=0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "  steps: 7\n" in done.stdout and "# the cluster can run this" in done.stdout
    assert "player-0 (ENVIRONMENT)" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_which_stage_has_nothing_to_do(tmp_path: Path) -> None:
    sets = ("run.dashboard_port=0", "hardware.scorer={resource: LOGPROBS}", "stages.logprobs=scorer", "training.batch.minibatches=1")
    done = rollart("run", "train", "--dry-run", *(part for s in (*sets, "training.loss.kl=0") for part in ("--set", s)), cwd=tmp_path)
    assert "# stages.logprobs: idle, since no training step needs it with training.loss.kl 0" in done.stdout
    assert "scorer-0" not in done.stdout
    done = rollart("run", "train", "--dry-run", *(part for s in (*sets, "training.loss.kl=0.1") for part in ("--set", s)), cwd=tmp_path)
    assert "# stages.logprobs: idle" not in done.stdout and "scorer-0 (LOGPROBS)" in done.stdout


def test_json_prints_one_object_on_the_last_line(tmp_path: Path) -> None:
    done = rollart("run", "train", "--dry-run", "--json", "--set", "run.dashboard_port=0", cwd=tmp_path)
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["ok"] is True and said["config"]["train"]["alpha"] == 1
    done = rollart("run", "train", "--dry-run", "--json", "--set", "train.stepz=7", cwd=tmp_path)
    said = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 2 and said == {"ok": False, "error": "train.stepz: unknown field; remove it or correct its spelling", "exit_code": 2}


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("tasks.chain_sum.environment=no_such_game", "tasks.chain_sum: unknown environment 'no_such_game'; known are"),
        ("tasks.chain_sum.reward=fairness", "tasks.chain_sum.reward: unknown verifier 'fairness'; known are"),
        ("tasks.frozen_lake.settings.size=1", "tasks.frozen_lake: "),
        ("run.root=ftp://nowhere.invalid/x", "ftp://nowhere.invalid/x"),
        ("run.root=/proc/no/such", "can't write to /proc/no/such"),
        ("run.scheduler=tcp://127.0.0.1:1", "run.scheduler: no Dask scheduler answers at tcp://127.0.0.1:1"),
        ("policy={model: /no/such/folder}", "policy.model: /no/such/folder"),
        ("run.root=memory://here", "run.root: memory://here is seen by one process alone"),
    ],
)
def test_what_a_run_cannot_start_with_is_one_line_and_exit_code_2(override: str, says: str, tmp_path: Path) -> None:
    done = rollart("run", "train", "--quiet", "--set", "run.dashboard_port=0", "--set", override, cwd=tmp_path)
    assert says in one_line(done)
    assert not (tmp_path / "runs").exists() or list((tmp_path / "runs").iterdir()) == []


def test_a_port_in_use_is_told(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = rollart("run", "train", "--set", f"run.dashboard_port={taken.getsockname()[1]}", cwd=tmp_path)
    assert "run.dashboard_port: port" in one_line(done) and "is in use" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_there_must_be_a_run_to_resume_or_report(tmp_path: Path) -> None:
    assert "holds no run" in one_line(rollart("run", "train", "--resume", cwd=tmp_path))
    assert "holds no run" in one_line(rollart("report", "nothing", cwd=tmp_path))
    done = rollart("runs", "--json", cwd=tmp_path)
    assert json.loads(done.stdout) == {"ok": True, "runs": []}


def test_it_is_reachable_as_a_dask_command(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "dask", "rollart", "run", "--help"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Runs FLOW from start to end" in done.stdout


@pytest.mark.parametrize(
    ("environment", "warm_up", "says"),
    [
        ("raise OSError('no disk')", "{steps: 0}", "cannot be imported from 'game:Game': OSError: no disk"),
        ("def __init__(self): self.levels", "{steps: 0}", "cannot be made with these settings: AttributeError"),
        (
            "def __init__(self): pass",
            "{steps: 2, episodes: {frozen_lake: 4}}",
            "warm_up.episodes.frozen_lake: environment 'game:Game' has no script()",
        ),
    ],
)
def test_an_environment_of_the_users_own_that_cannot_work_is_found_before_the_run(environment: str, warm_up: str, says: str, tmp_path: Path) -> None:
    body = f"    {environment}\n    def reset(self, seed): return ''\n    def step(self, action): return None\n    def close(self): pass\n"
    (tmp_path / "game.py").write_text(f"class Game:\n{body}")
    sets = ("run.dashboard_port=0", "tasks.0.environment=game:Game", "tasks.0.settings={}", f"warm_up={warm_up}")
    done = rollart("run", "train", *(part for s in sets for part in ("--set", s)), cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert says in one_line(done)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ('{"max_position_embeddings": 128}', "engine.max_length: 256 is over the 128 positions of policy.model"),
        ('{"n_positions": 64}', "engine.max_length: 256 is over the 64 positions of policy.model"),
        ('{"text_config": {"max_position_embeddings": 32}}', "engine.max_length: 256 is over the 32 positions of policy.model"),
        ("[1]", "config.json is no JSON object"),
        ("{", "config.json is no JSON object"),
    ],
)
def test_a_model_that_cannot_hold_the_sequences_is_found_before_the_run(said: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(said)
    (tmp_path / "tokenizer.json").write_text("{}")
    sets = ("run.dashboard_port=0", f"policy={{model: {tmp_path}}}")
    assert says in one_line(rollart("run", "train", "--dry-run", *(part for s in sets for part in ("--set", s)), cwd=tmp_path))


def test_the_command_line_imports_nothing_that_reads_the_environment_before_it_has_set_it() -> None:
    code = "import sys, rollart.cli; print(sorted({'dask', 'distributed', 'torch'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
