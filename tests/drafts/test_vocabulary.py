import pytest
import torch

from rollart.drafts.errors import DraftError
from rollart.drafts.vocabulary import frequent_tokens


def test_the_most_frequent_tokens_are_kept_ascending_and_of_equals_the_smaller_ids():
    assert frequent_tokens(torch.tensor([0, 5, 9, 5, 5]), 3).tolist() == [1, 2, 3]


def test_what_ends_a_response_is_kept_however_rare_it_is():
    assert frequent_tokens(torch.tensor([0, 5, 9, 5, 5]), 2, always=(0,)).tolist() == [0, 2]


@pytest.mark.parametrize(("kept", "always"), [(1, (0, 3)), (6, ()), (0, (2,))])
def test_a_number_that_does_not_fit_is_refused(kept: int, always: tuple[int, ...]):
    with pytest.raises(DraftError, match=f"kept is {kept}"):
        frequent_tokens(torch.tensor([0, 5, 9, 5, 5]), kept, always)
