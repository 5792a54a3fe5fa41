"""A draft head that learns beside the policy: what it changes of the policy (nothing), what it learns, and how it is saved."""

from pathlib import Path

import pytest
import torch

from rollart.drafts.errors import DraftError
from rollart.drafts.head import DraftHead
from rollart.training.batch import TrainBatch, build_batch
from rollart.training.learner import Learner
from rollart.training.settings import LearnerSettings

ONLINE = {"online": True, "steps": 2, "optimiser": {"lr": 5e-3}}


def learner_of(folder: Path, **fields: object) -> Learner:
    return Learner(folder, LearnerSettings.model_validate(fields))


def batch_of(make_trajectories, step: int) -> TrainBatch:
    trajectories = make_trajectories((3, 2), seed=step)
    return build_batch(trajectories, {t.attempt: 1.0 if t.attempt.member else -1.0 for t in trajectories}, step)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("packing", [True, False])
def test_the_policy_is_bit_for_bit_what_it_is_without_a_head(request, make_trajectories, family: str, packing: bool):
    folder = request.getfixturevalue(family)
    batch = {"minibatches": 2, "packing": packing, "token_budget": 60}
    plain, drafting = learner_of(folder, batch=batch), learner_of(folder, batch=batch, draft=ONLINE)
    for step in range(3):
        told = [learner.train_step(batch_of(make_trajectories, step)) for learner in (plain, drafting)]
        assert told[0].draft is None
        assert told[1].draft is not None
        assert told[0].loss == told[1].loss
    for name, tensor in plain.weights().items():
        assert torch.equal(tensor, drafting.weights()[name]), name
    assert torch.equal(plain.state()[0]["rng/torch"], drafting.state()[0]["rng/torch"])


def test_packed_and_padded_batches_teach_a_head_the_same(llama: Path, make_trajectories):
    heads = []
    for packing in (True, False):
        learner = learner_of(llama, batch={"packing": packing}, draft=ONLINE)
        for step in range(2):
            learner.train_step(batch_of(make_trajectories, step))
        heads.append(learner.draft.weights())
    for name, tensor in heads[0].items():
        torch.testing.assert_close(tensor, heads[1][name], atol=2e-4, rtol=1e-3)


def test_acceptance_rises_at_every_step_of_the_draft(llama: Path, make_trajectories):
    # The policy's rate is next to nothing, so that what the head follows stays where it is; its logits are steep, so that there is much to learn.
    learner = learner_of(llama, draft=ONLINE, optimiser={"lr": 1e-9})
    with torch.no_grad():
        for parameter in learner.policy.model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(12.0)
    learner.draft_with()
    told = [learner.train_step(batch_of(make_trajectories, step)).draft for step in range(60)]
    first, last = told[0].acceptance, told[-1].acceptance
    assert len(first) == 2
    assert all(after > before + 0.15 for before, after in zip(first, last, strict=True)), (first, last)
    assert told[-1].entropies[0] < told[0].entropies[0]


def test_a_saved_head_goes_on_bit_for_bit(llama: Path, make_trajectories):
    straight = learner_of(llama, draft=ONLINE)
    for step in range(2):
        straight.train_step(batch_of(make_trajectories, step))
    arrays, document = straight.state()
    resumed = learner_of(llama, draft=ONLINE)
    resumed.load_state(arrays, document)
    for learner in (straight, resumed):
        learner.train_step(batch_of(make_trajectories, 2))
    for name, tensor in straight.draft.weights().items():
        assert torch.equal(tensor, resumed.draft.weights()[name]), name


def test_a_run_that_began_without_a_head_is_resumed_with_a_fresh_one(llama: Path, make_trajectories):
    plain = learner_of(llama)
    plain.train_step(batch_of(make_trajectories, 0))
    drafting = learner_of(llama, draft=ONLINE)
    drafting.load_state(*plain.state())
    assert drafting.train_step(batch_of(make_trajectories, 1)).draft is not None


def test_a_gradient_that_is_not_finite_ends_the_heads_learning_and_not_the_run(llama: Path, make_trajectories, caplog):
    learner = learner_of(llama, draft={**ONLINE, "optimiser": {"max_skips": 0}})
    with torch.no_grad():
        learner.draft.head.fc.weight.fill_(float("nan"))
    told = [learner.train_step(batch_of(make_trajectories, step)) for step in range(2)]
    assert [t.draft for t in told] == [None, None]
    assert all(t.optimiser_steps == 1 for t in told)
    assert "the draft head learns no more" in caplog.text


def test_a_fresh_head_has_the_sizes_asked_for_and_begins_with_the_policys_output_layer(llama: Path):
    kept = torch.tensor([1, 4, 5, 9])
    learner = learner_of(llama, draft={**ONLINE, "width": 8, "heads": 2})
    head = learner.draft_with(kept=kept).head
    assert (head.config.kept, head.config.width, head.config.heads) == (4, 8, 2)
    assert torch.equal(head.lm_head.weight, learner.policy.output_weight[kept])


def test_a_head_for_another_policy_is_refused(llama: Path, gpt2: Path):
    head: DraftHead = learner_of(gpt2, draft=ONLINE).draft.head
    with pytest.raises(DraftError, match="model_type gpt2"):
        learner_of(llama, draft=ONLINE).draft_with(head)


def test_a_head_that_met_what_is_not_finite_too_often_stops_says_so_once_and_stays_as_it_was(llama: Path, make_trajectories, caplog):
    learner = learner_of(llama, draft={**ONLINE, "optimiser": {"lr": 5e-3, "max_skips": 0}})
    draft = learner.draft
    with torch.no_grad():
        draft.head.fc.weight[0, 0] = torch.nan
    assert learner.train_step(batch_of(make_trajectories, 0)).draft is None
    assert draft.stopped
    with torch.no_grad():
        draft.head.fc.weight[0, 0] = 0.0
    before = draft.weights()
    assert learner.train_step(batch_of(make_trajectories, 1)).draft is None
    assert draft.optimiser.steps == 0
    assert sum("learns no more" in record.message for record in caplog.records) == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in draft.weights().items())
