import pytest
from pydantic import ValidationError

from rollart.training.schedule import learning_rate
from rollart.training.settings import LearnerSettings, OptimiserSettings


def test_warm_up_rises_linearly_to_the_peak_and_a_constant_rate_stays_there() -> None:
    settings = OptimiserSettings(lr=1.0, warmup_steps=4)
    assert [learning_rate(settings, s) for s in (0, 1, 3, 4, 900)] == [0.25, 0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("decay", "middle"), [("linear", 0.6), ("cosine", 0.6)])
def test_decay_reaches_its_floor_at_the_end_and_stays(decay: str, middle: float) -> None:
    settings = OptimiserSettings.model_validate({"lr": 1.0, "warmup_steps": 10, "decay": decay, "total_steps": 110, "min_lr_share": 0.2})
    assert [learning_rate(settings, s) for s in (10, 60, 110, 500)] == pytest.approx([1.0, middle, 0.2, 0.2])


def test_cosine_and_linear_decay_differ_on_the_way() -> None:
    fields = {"lr": 1.0, "total_steps": 100, "min_lr_share": 0.0}
    linear, cosine = (OptimiserSettings.model_validate({**fields, "decay": d}) for d in ("linear", "cosine"))
    assert learning_rate(linear, 25) == pytest.approx(0.75)
    assert learning_rate(cosine, 25) == pytest.approx(0.5 * (1 + 2**-0.5))


def test_unknown_fields_and_impossible_values_are_refused_with_their_path() -> None:
    with pytest.raises(ValidationError, match=r"optimiser\.learning_rate"):
        LearnerSettings.model_validate({"optimiser": {"learning_rate": 1.0}})
    with pytest.raises(ValidationError, match=r"loss\.truncate"):
        LearnerSettings.model_validate({"loss": {"truncate": 0.5}})


def test_every_field_has_a_description() -> None:
    for part in LearnerSettings.model_fields.values():
        fields = part.annotation.model_fields  # type: ignore[union-attr]
        assert all(f.description for f in fields.values())
