"""Names, import paths and settings that `make` takes, and those it refuses."""

import subprocess
import sys

import pytest

from rollart.environments.catalogue import SHIPPED
from rollart.environments.frozen_lake import FrozenLake
from rollart.environments.protocol import Scripted, StepResult
from rollart.environments.registry import EnvironmentFailed, EnvironmentSettingsError, UnknownEnvironment, make
from rollart.rewards.registry import UnknownVerifier, resolve


class Echo:
    """A user's environment without a settings model."""

    def __init__(self, word: str = "hello") -> None:
        self.word = word

    def reset(self, seed: int) -> str:
        return self.word

    def step(self, action: str) -> StepResult:
        return StepResult(action, 1.0, terminated=True)

    def close(self) -> None: ...


def test_a_short_name_and_an_import_path_make_the_same_class():
    by_path = make("rollart.environments.frozen_lake:FrozenLake", size=5)
    assert type(make("frozen_lake")) is type(by_path) is FrozenLake
    assert by_path.settings.size == 5


def test_an_environment_of_the_users_own_takes_keyword_settings():
    assert make(f"{__name__}:Echo", word="hi").reset(0) == "hi"
    with pytest.raises(EnvironmentSettingsError, match="'wrod'"):
        make(f"{__name__}:Echo", wrod="hi")


NEEDS_SETTINGS = {"questions", "openenv"}
BY_ITSELF = sorted(name for name, entry in SHIPPED.items() if not entry.extra and name not in NEEDS_SETTINGS)


@pytest.mark.parametrize("name", BY_ITSELF)
def test_every_shipped_environment_plays_itself_to_its_end(name):
    import random

    environment, rng = make(name), random.Random(0)
    assert isinstance(environment, Scripted)
    assert environment.reset(3)
    for _ in range(200):
        result = environment.step(environment.script(rng))
        if result.terminated or result.truncated:
            break
    assert result.terminated or result.truncated
    environment.close()


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UnknownEnvironment, match=r"frozen_lake, .*guess_number, .*reasoning"):
        make("frozen_pond")


@pytest.mark.parametrize("path", ["no.such.module:Thing", "rollart.environments.registry:NoSuch", "rollart.environments.registry:make"])
def test_a_path_that_names_no_environment_is_refused(path):
    with pytest.raises(UnknownEnvironment, match=path.split(":")[1]):
        make(path)


def test_a_wrong_setting_is_named():
    with pytest.raises(EnvironmentSettingsError, match=r"frozen_lake.*\bsise\b"):
        make("frozen_lake", sise=4)
    with pytest.raises(EnvironmentSettingsError, match=r"\bturns\b.*got 0"):
        make("guess_number", turns=0)


def test_a_worker_that_plays_never_loads_torch():
    program = (
        "import sys; from rollart.environments.registry import make\n"
        f"for name in {BY_ITSELF}: e = make(name); e.reset(1); e.step('1'); e.close()\n"
        "import rollart.rewards.registry, rollart.rewards.reasoning\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class Unmakeable:
    """A user's environment whose making ends in what its setting says."""

    def __init__(self, how: str = "") -> None:
        if how == "exit":
            sys.exit(7)
        raise FileNotFoundError("levels.json")

    def reset(self, seed: int) -> str:
        return ""

    def step(self, action: str) -> StepResult:
        return StepResult("", terminated=True)

    def close(self) -> None: ...


def test_what_an_environment_raises_where_it_is_made_is_told_by_its_name():
    with pytest.raises(EnvironmentFailed, match=r"test_registry:Unmakeable' cannot be made with these settings: FileNotFoundError: levels.json"):
        make(f"{__name__}:Unmakeable")
    with pytest.raises(EnvironmentFailed, match="SystemExit: 7"):
        make(f"{__name__}:Unmakeable", how="exit")


@pytest.mark.parametrize(
    ("code", "says"), [("raise RuntimeError('boom')", "RuntimeError: boom"), ("def (", "SyntaxError"), ("exit(9)", "SystemExit: 9")]
)
def test_a_module_that_cannot_be_imported_is_refused_whatever_it_raises(code, says, tmp_path, monkeypatch):
    (tmp_path / "spoilt_module.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnknownEnvironment, match=f"'spoilt_module:Game' cannot be imported .*{says}"):
        make("spoilt_module:Game")
    with pytest.raises(UnknownVerifier, match=f"'spoilt_module:judge' cannot be imported .*{says}"):
        resolve("spoilt_module:judge")


def test_a_module_that_is_not_found_is_told_with_where_python_looks_and_one_that_it_imports_without(tmp_path, monkeypatch):
    with pytest.raises(UnknownEnvironment, match=r"No module named 'nowhere'; put the folder that holds it into PYTHONPATH"):
        make("nowhere.games:Game")
    with pytest.raises(UnknownVerifier, match=r"No module named 'nowhere'; put the folder that holds it into PYTHONPATH"):
        resolve("nowhere:judge")
    (tmp_path / "needy_module.py").write_text("import nowhere")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnknownEnvironment, match=r"No module named 'nowhere'$"):
        make("needy_module:Game")
