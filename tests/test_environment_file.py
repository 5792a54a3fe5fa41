"""The files that pin what rollart needs agree with each other."""

import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def project_requirements() -> list[str]:
    return project()["dependencies"] + project()["optional-dependencies"]["dev"]


def extras() -> list[str]:
    """Requirements of what an installation may have besides."""
    optional = project()["optional-dependencies"]
    return [text for name in ("lora", "smollm2", "stores", "textarena", "tools") for text in optional[name]]


def environment() -> list:
    return yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]


def pip_lines() -> list[str]:
    return next(entry["pip"] for entry in environment() if isinstance(entry, dict))


def locked() -> dict[str, str]:
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def test_conda_gives_the_same_requirements_as_the_project():
    packages = [line for line in pip_lines() if not line.startswith("-")]
    assert sorted(packages) == sorted(project_requirements())


def test_conda_gives_a_python_that_the_project_takes():
    (python,) = [entry for entry in environment() if isinstance(entry, str) and entry.startswith("python=")]
    assert Requirement(f"python{project()['requires-python']}").specifier.contains(python.removeprefix("python=") + ".0")


def test_conda_installs_the_project_itself_within_the_lock():
    assert {line for line in pip_lines() if line.startswith("-")} == {"--constraint requirements.lock", "--editable ."}


def test_the_lock_holds_every_requirement_at_a_version_that_the_project_takes():
    versions = locked()
    for text in project_requirements() + extras():
        requirement = Requirement(text)
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None, f"requirements.lock lacks {requirement.name}"
        assert requirement.specifier.contains(version), f"requirements.lock has {requirement.name} {version}, pyproject.toml wants {text}"


def test_every_dependency_is_pinned_exactly():
    exact = project()["dependencies"] + extras()
    loose = [text for text in exact if {s.operator for s in Requirement(text).specifier} != {"=="}]
    assert loose == []


def test_the_lock_holds_the_package_of_the_real_models_weights():
    config = yaml.safe_load((ROOT / "flows" / "configs" / "smollm2.yaml").read_text())
    assert canonicalize_name(config["policy"]["model"].removeprefix("package:")) in locked()


def test_the_lock_names_versions_only():
    for version in locked().values():
        assert "+" not in version
        assert "/" not in version


def test_the_makefile_installs_the_pinned_torch():
    makefile = (ROOT / "Makefile").read_text()
    (pin,) = [text for text in project()["dependencies"] if text.startswith("torch==")]
    assert f"torch-cpu := {pin}\n" in makefile
    assert f"torch-gpu := {pin.replace('==', '===')}\n" in makefile
