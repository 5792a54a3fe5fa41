"""What a configuration may say: every shipped one loads, and each refusal names the field and what to do."""

from pathlib import Path

import pytest
import yaml

from rollart.config import ConfigError, changed_fields, load, parse
from rollart.engines.speculative.settings import SpeculationSettings
from rollart.environments import registry as environments
from rollart.opening import engine_host, learner_settings
from rollart.rewards import registry as rewards
from rollart.run import RunFolder
from rollart.types import SamplingTransform

CONFIGS = sorted((Path(__file__).parent.parent / "flows" / "configs").glob("*.yaml"))
QUICKSTART = (Path(__file__).parent.parent / "flows" / "configs" / "quickstart.yaml").read_text()


def quickstart(*overrides: str) -> object:
    return parse(QUICKSTART, list(overrides))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_shipped_configuration_loads_and_names_what_exists(path: Path) -> None:
    config = load(path)
    for task in config.tasks:
        environments.make(task.environment, **task.settings).close()
        rewards.resolve(task.reward)
    assert parse(config.to_yaml()) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stepz=3", "train.stepz: unknown field"),
        ("train.steps=0", "train.steps: input should be greater than or equal to 1, got 0"),
        ("train.steps=many", "train.steps: input should be a valid integer"),
        ("stages.train=gpu", "stages.train: no hardware class 'gpu'; declare hardware.gpu or use one of"),
        ("hardware.player.resource=TRAIN", "hardware: resource 'TRAIN' stands twice"),
        ("tasks.chain_sum.score_in=future", "stages.reward: missing, and the scores of chain_sum are futures of their own; map it to one of"),
        ("stages.logprobs=gpu", "stages.logprobs: no hardware class 'gpu'; declare hardware.gpu or use one of"),
        ("logprobs.device=cuda:1", "logprobs: is of workers that stages.logprobs names; name another class there than in stages.train"),
        ("tasks.0.classes={logprobs: player}", "tasks.frozen_lake.classes.logprobs: it serves all tasks at once; set stages.logprobs"),
        ("tasks.chain_sum.max_tokens=4096", "tasks.chain_sum.max_tokens: 4096 is over engine.max_length"),
        ("tasks.chain_sum.max_new_tokens=64", "max_new_tokens 64 leaves no room in max_tokens 64"),
        ("tasks.0.name=guess_number", "tasks: 'guess_number' stands twice"),
        ("tasks.chain_sum.sampling.min_p=0.1", "min_p is for evaluation: leave it at 0 here, and set evaluate.min_p"),
        ("tasks.chain_sum.min_members=9", "min_members 9 is over group_size"),
        ("warm_up.episodes.lake=3", "warm_up.episodes.lake: no such task"),
        ("train.groups=2", "train.groups: 2 leaves a task out of 3 without a group"),
        ("run.deterministic=true", "run.deterministic: needs train.alpha 0"),
        ("engine.speculation.draft=model", "engine.speculation.model: name the folder of the model that drafts, or the store of its versions"),
        ("engine.speculation.draft=head", "engine.speculation.model: name the folder of the head that drafts, or the store of its versions"),
        ("engine.speculation.model=/a", "engine.speculation.model: is of draft model or head, not of none; change that, or leave it out"),
        ("engine.speculation.versions=/a", "engine.speculation.versions: is of draft model or head, not of none; change that, or leave it out"),
        ("engine.speculation={draft: head, model: /a, follow: true}", "engine.speculation.follow: name the store whose versions are followed"),
        ("training.draft={model: /a, width: 8}", "training.draft.width: is of a fresh head, and training.draft.model names one that is there"),
        ("training.draft={online: true, kept: 8}", "training.draft.kept: which tokens are frequent isn't known before the run"),
        ("training={draft: {online: true}, model: {shard: true}}", "training.draft.online: not with training.model.shard"),
        ("engine.speculation.length=16", "engine.speculation.length: input should be less than or equal to 15"),
        ("policy.model=/some/folder", "give one of policy.model and policy.tiny"),
        ("policy.chat=true", "policy: policy.tiny has no chat template: set policy.chat to false"),
        ("tasks.0.system=hello", "tasks.frozen_lake.system: needs policy.chat, which makes it a message"),
        ("tasks.nowhere.weight=2", "--set tasks.nowhere: there is no such entry"),
        ("train.steps", "--set train.steps: write a path, an equals sign and a value"),
        ("run.name=a/b", "run.name: string should match pattern"),
        ("run.root=''", "run.root: string should have at least 1 character"),
        ("policy.tiny.heads=5", "policy.tiny: hidden_size 96 is no multiple of 10, twice the heads"),
        ("rollout.lease=.inf", "rollout.lease: input should be a finite number"),
        ("rollout.lease=100", "rollout.lease: 100 s end before tasks.frozen_lake.reset_timeout, step_timeout and reward_timeout (120 s, 60 s and"),
        ("tasks.guess_number.reward_timeout=120", "rollout.lease: 300 s end before tasks.guess_number.reset_timeout, step_timeout and reward_time"),
        ("hardware.engine.memory=2 GiB", "hardware.engine.memory: a limit would end the generate workers in the middle of a step or a response"),
        ("hardware.player.memory=1 KiB", "hardware.player.memory: input should be greater than or equal to 67108864"),
        ("rollout.silence=900", "rollout.silence: 900 s are not under run.step_timeout, 900 s, which would end the run before; lower it"),
        ("rollout.worker_wait=1000", "rollout.worker_wait: 1000 s are not under run.step_timeout, 900 s"),
        ("run.step_timeout=300", "run.step_timeout: 300 s end the run before a silent attempt is tried again, rollout.lease 300 s"),
        ("training.optimiser.lr=.inf", "training.optimiser.lr: input should be a finite number"),
        ("training.optimiser.betas=[0.9, 1]", "training.optimiser.betas: each must be at least 0 and under 1, got (0.9, 1.0)"),
        ("training.model.device=banana", "training.model.device: string should match pattern"),
        ("engine.device=banana", "engine.device: string should match pattern"),
        ("engine.sglang.python=/venv/bin/python", "engine.sglang: is of engine.kind sglang, not of embedded; change that, or leave it out"),
        (
            "engine={kind: sglang, sglang: {flags: {dtype: auto}}}",
            "engine.sglang.flags.dtype: the system sets it; in a configuration it follows",
        ),
        (
            "engine={kind: sglang, sglang: {flags: {quantization: fp8}}}",
            "engine.sglang.flags.quantization: it would sample from another dist",
        ),
        (
            "engine={kind: sglang, sglang: {flags: {speculative-algorithm: NGRAM}}}",
            "engine.sglang.flags.speculative-algorithm: the system sets it; in a configuration it follows from engine.speculation.draft",
        ),
        ("engine={kind: sglang, speculation: {draft: ngram}}", "engine.speculation.draft: on a CPU SGLang accepts drafts greedily whatever"),
        (
            "engine={kind: sglang, device: cuda, speculation: {draft: head, versions: /a}}",
            "engine.speculation.model: name the folder of a head to start SGLang's servers with",
        ),
        ("engine={kind: sglang, sglang: {tensor_parallel: 2}}", "engine.sglang.tensor_parallel: needs engine.device cuda; leave it at 1 on a CPU"),
        ("engine={kind: sglang, sglang: {memory_fraction: 0.8}}", "engine.sglang.memory_fraction: on a CPU engine.slots says how large"),
        ("engine={kind: sglang, sglang: {attention_backend: '--x'}}", "engine.sglang.attention_backend: string should match pattern"),
        ("tasks.0.weight=1e308", "tasks.0.weight: input should be less than or equal to"),
        ("tasks.\u00b2.weight=1", "--set tasks.\u00b2: there is no such entry"),
        ("run.name=2024-13-45", "the value is no valid YAML (ValueError in a number, a date or a tagged value: month must be in 1..12)"),
        ("train.steps=" + "9" * 5000, "the value is no valid YAML"),
    ],
)
def test_what_cannot_be_is_refused_with_the_fields_path_and_a_remedy(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        quickstart(override)
    assert message in str(refused.value)


def test_an_engine_of_sglang_is_taken_with_what_it_is_given() -> None:
    config = quickstart(
        "engine={kind: sglang, device: 'cuda:0', max_length: 256, sglang: {python: /venv/bin/python, tensor_parallel: 2, flags: {page-size: 16}}}"
    )
    assert parse(config.to_yaml()) == config
    with pytest.raises(ConfigError, match=r"run\.deterministic: needs engine\.kind embedded"):
        quickstart("engine.kind=sglang", "run.deterministic=true", "train.alpha=0")


def test_a_deterministic_run_does_not_speculate() -> None:
    with pytest.raises(ConfigError, match=r"run\.deterministic: allows no engine\.speculation\.draft, since what is drafted"):
        quickstart("engine.speculation.draft=ngram", "run.deterministic=true", "train.alpha=0")


@pytest.mark.parametrize(
    ("evaluate", "message"),
    [
        ("{min_p: 0.1}", "engine.speculation.draft: SGLang verifies drafts without min_p; set draft to none, or evaluate.min_p to 0"),
        ("{top_k: 4, top_p: 0.9}", "engine.speculation.draft: where SGLang verifies drafts, top_k and top_p cut one after the other"),
    ],
)
def test_drafts_of_an_sglang_server_are_refused_where_they_would_change_what_is_sampled(evaluate: str, message: str) -> None:
    engine = "engine={kind: sglang, device: cuda, max_length: 256, speculation: {draft: ngram}}"
    with pytest.raises(ConfigError) as refused:
        quickstart(engine, f"evaluate={evaluate}")
    assert message in str(refused.value)
    assert quickstart(engine, "evaluate={top_k: 4}").engine.speculation.draft == "ngram"


def test_how_an_sglang_server_speculates_reaches_its_command_line() -> None:
    given = "engine={kind: sglang, device: cuda, max_length: 256, speculation: {draft: head, model: /heads/a, length: 3}, sglang: {head: eagle}}"
    launch = engine_host(quickstart(given), RunFolder("/runs/a"), 0).settings
    command = launch.command(Path("/model"), "127.0.0.1")
    assert command[command.index("--speculative-algorithm") + 1] == "EAGLE"
    assert command[command.index("--speculative-draft-model-path") + 1] == "/heads/a"


def test_cuts_are_trained_on_with_the_embedded_engine_alone_and_min_p_is_of_evaluations() -> None:
    cut = ("tasks.0.sampling={temperature: 0.8, top_k: 20, top_p: 0.9}",)
    config = quickstart(*cut, "evaluate={temperature: 0.6, top_p: 0.95, min_p: 0.05}")
    assert config.tasks[0].sampling.transform == SamplingTransform(0.8, top_p=0.9, top_k=20)
    assert config.tasks[1].sampling.transform == SamplingTransform()
    assert config.evaluate.transform == SamplingTransform(0.6, top_p=0.95, min_p=0.05)
    with pytest.raises(ConfigError, match=rf"tasks\.{config.tasks[0].name}\.sampling: top_k and top_p can't be trained on with engine\.kind sglang"):
        quickstart("engine.kind=sglang", *cut)
    assert quickstart("engine.kind=sglang", "evaluate.min_p=0.1").evaluate.transform.min_p == 0.1


def test_how_an_engine_speculates_reaches_its_command_line() -> None:
    config = quickstart("engine.speculation={draft: model, model: /drafts/small, length: 3, adaptive: false, memory: 7}")
    settings = engine_host(config, RunFolder("/runs/a"), 0).settings
    assert settings.speculation == SpeculationSettings("model", 3, False, "/drafts/small", 7)
    config = quickstart("engine.speculation={draft: head, versions: s3://drafts/one, follow: true}")
    launch = engine_host(config, RunFolder("/runs/a"), 0).settings
    assert launch.speculation == SpeculationSettings("head", versions="s3://drafts/one", follow=True)


def test_a_head_that_learns_in_the_run_is_the_one_that_drafts_unless_others_are_named() -> None:
    learning = ("training.draft.online=true", "engine.speculation.draft=head")
    own = engine_host(quickstart(*learning), RunFolder("/runs/a"), 0).settings
    assert own.speculation == SpeculationSettings("head", versions="/runs/a/drafts", follow=True)
    other = engine_host(quickstart(*learning, "engine.speculation.versions=/b"), RunFolder("/runs/a"), 0).settings
    assert other.speculation == SpeculationSettings("head", versions="/b")


def test_all_contradictions_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        quickstart("stages.train=gpu", "train.groups=1")
    assert len(str(refused.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("run.storage_options={key: AKIA1234, secret: hush-hush}", "run.storage_options: key, secret:"),
        ("run.storage_options={client_kwargs: {aws_secret_access_key: hush-hush}}", "run.storage_options: client_kwargs.aws_secret_access_key:"),
        ("run.storage_options={token: {private_key: hush-hush}}", "run.storage_options: token:"),
        ("run.root=s3://user:hush-hush@bucket/runs", "run.root:"),
    ],
)
def test_a_credential_is_refused_without_being_repeated(override: str, field: str) -> None:
    with pytest.raises(ConfigError, match=r"AWS_PROFILE.*GOOGLE_APPLICATION_CREDENTIALS") as caught:
        quickstart(override)
    assert field in str(caught.value)
    assert "hush-hush" not in str(caught.value)


def test_options_that_are_no_credentials_are_kept() -> None:
    options = "{token: anon, profile: lab, endpoint_url: 'http://127.0.0.1:1', config_kwargs: {signature_version: s3v4}}"
    config = quickstart(f"run.storage_options={options}")
    assert config.run.storage_options["config_kwargs"] == {"signature_version": "s3v4"}
    assert quickstart("run.storage_options={token: /etc/keys/lab.json}").run.storage_options == {"token": "/etc/keys/lab.json"}


def test_wrong_yaml_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("train:\n  steps: [1\npolicy: {}\n")
    with pytest.raises(ConfigError, match=r"broken.yaml: line 3, column \d+ is no valid YAML"):
        load(path)
    with pytest.raises(ConfigError, match="can't be read"):
        load(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train: {steps: 3}\nrun: {}\ntrain: {alpha: 0}\n", "line 3, column 1 is no valid YAML ('train' stands twice)"),
        ("train: {steps: 3, steps: 4}\n", "line 1, column 19 is no valid YAML ('steps' stands twice)"),
        ("tasks: &t [*t]\n", "found unconstructable recursive node"),
        ("[" * 5000, "nested too deeply"),
        ("run: \x00\n", "character #x0000 is not allowed"),
        ("run: !!timestamp x\n", "in a number, a date or a tagged value"),
        ("run: !!bool x\n", "in a number, a date or a tagged value"),
        ("run: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
    ],
)
def test_yaml_that_says_a_thing_twice_or_nothing_that_can_be_read_is_one_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(text)
    assert says in str(refused.value) and len(str(refused.value).splitlines()) == 1


def test_a_merged_key_may_be_said_again() -> None:
    text = QUICKSTART.replace("evaluate: {", "evaluate: {<<: {every: 7}, ").replace("train: {", "train: {<<: {alpha: 0, max_skipped: 4}, ", 1)
    config = parse(text)
    assert (config.evaluate.every, config.train.alpha, config.train.max_skipped) == (50, 1, 4)


def test_overrides_reach_lists_by_name_and_read_numbers_as_people_write_them() -> None:
    config = quickstart("tasks.chain_sum.group_size=4", "tasks.0.weight=2.5", "training.optimiser.lr=1e-3")
    assert config.task("chain_sum").group_size == 4
    assert config.tasks[0].weight == 2.5
    assert config.training.optimiser.lr == 1e-3


def test_quotas_follow_weights_and_sum_to_the_batch() -> None:
    config = quickstart("train.groups=10", "tasks.0.weight=2", "tasks.1.weight=1", "tasks.2.weight=1")
    assert [q.quota for q in config.quotas] == [5, 3, 2]
    assert [q.quota for q in quickstart("train.groups=3", "tasks.0.weight=100").quotas] == [1, 1, 1]


def test_a_resumed_run_may_change_its_length_but_not_its_learning_rate() -> None:
    old = quickstart()
    assert changed_fields(old, quickstart("train.steps=999", "run.dashboard_port=1", "evaluate.episodes=7")) == []
    assert changed_fields(old, quickstart("training.optimiser.lr=0.5", "train.alpha=2")) == ["train.alpha", "training.optimiser.lr"]


def test_log_probabilities_are_computed_where_the_policy_is_trained_unless_another_class_is_named_for_a_step_that_needs_them() -> None:
    scorer = ("hardware.scorer={resource: LOGPROBS}", "stages.logprobs=scorer")
    for needs in ("training.loss.kl=0.1", "training.batch.minibatches=2"):
        here, there = quickstart(needs), quickstart(*scorer, needs)
        assert (here.logprobs_elsewhere, here.affinity.hardware_class("logprobs"), here.idle) == (False, "trainer", {})
        assert (there.logprobs_elsewhere, there.affinity.hardware_class("logprobs"), there.idle) == (True, "scorer", {})
        assert not quickstart(*scorer, needs, "stages.logprobs=trainer").logprobs_elsewhere
    idle = quickstart(*scorer, "training.loss.kl=0", "training.batch.minibatches=1")
    assert not idle.logprobs_elsewhere and "scorer" not in idle.affinity.used()
    assert "training.loss.kl 0" in idle.idle["logprobs"]


def test_every_field_has_a_description() -> None:
    def check(model: type, path: str) -> list[str]:
        missing = []
        for name, info in model.model_fields.items():
            inner = getattr(info.annotation, "model_fields", None)
            if inner is None and not info.description:
                missing.append(f"{path}.{name}")
            if inner is not None:
                missing += check(info.annotation, f"{path}.{name}")
        return missing

    assert check(type(quickstart()), "config") == []
    assert yaml.safe_load(QUICKSTART)["policy"]["tiny"]


def test_a_file_that_is_no_text_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match=r"--config: .*model.safetensors is no UTF-8 text"):
        load(path)


def test_a_task_takes_what_it_does_not_say_of_its_advantages_from_the_common_settings() -> None:
    config = quickstart("training.advantage.normalise=task", "tasks.chain_sum.advantage.name=rloo", "tasks.chain_sum.advantage.weight=2")
    plan = config.advantages
    assert (plan.of("chain_sum").name, plan.of("chain_sum").weight, plan.of("chain_sum").normalise) == ("rloo", 2.0, "task")
    assert (plan.of("frozen_lake").name, plan.of("frozen_lake").weight) == ("grpo", 1.0)
    assert learner_settings(config).advantage == plan
    assert not plan.needs_values and quickstart("tasks.0.advantage.name=gae").advantages.needs_values


def test_whether_a_group_needs_spread_follows_from_its_tasks_estimator() -> None:
    config = quickstart("tasks.chain_sum.advantage.name=reinforce", "tasks.chain_sum.filters.long_share=0.5", "tasks.0.filters.no_signal=replace")
    quotas = {q.task: q for q in config.quotas}
    assert [quotas[t].spread for t in ("frozen_lake", "guess_number", "chain_sum")] == [True, True, False]
    assert (quotas["chain_sum"].long_share, quotas["frozen_lake"].replace_flat, quotas["guess_number"].replace_flat) == (0.5, True, False)


def test_a_verifier_that_is_quick_by_nature_runs_in_the_trajectorys_task_and_no_worker_is_asked_for_on_its_account() -> None:
    judge = ("hardware.judge={resource: REWARD}", "stages.reward=judge")
    here, some, own = (
        quickstart(*judge),
        quickstart(*judge, "tasks.chain_sum.score_in=future"),
        quickstart(*judge, "tasks.chain_sum.reward=my.rewards:mine"),
    )
    assert [t.scored_apart for t in here.tasks] == [False, False, False]
    assert "judge" not in here.affinity.used()
    assert "tasks[].score_in" in here.idle["reward"]
    for config in (some, own):
        assert [t.scored_apart for t in config.tasks] == [False, False, True]
        assert config.affinity.hardware_class("reward", "chain_sum") == "judge"
        assert config.idle == {}
