"""Arguments of one forward, in prompts, turns and decoding steps."""

import pytest
import torch

from retain.hf.intercept.forward_call import read_call
from tests.refused import refused

IDS = torch.tensor([[5, 6, 7], [0, 8, 9]])
MASK = torch.tensor([[1, 1, 1], [0, 1, 1]])
PAST = {"past_BT": MASK.bool(), "last_B": torch.tensor([2, 1]), "reads_prompt": False}


def read(past=None, ids=IDS, **given):
    return read_call({"input_ids": ids, **given}, **(past or {}))


def test_a_prompt_a_turn_and_a_step():
    prompt = read(attention_mask=MASK, position_ids=torch.tensor([[0, 1, 2], [0, 0, 1]]))
    assert prompt.is_prefill and torch.equal(prompt.valid_BS, MASK.bool())
    assert read().valid_BS is None and read().positions_BS.tolist() == [[0, 1, 2]] * 2
    positions = torch.tensor([[3, 4, 5], [2, 2, 3]])
    turn = read(PAST, attention_mask=torch.cat([MASK, MASK], dim=1), position_ids=positions)
    assert not turn.is_prefill and torch.equal(turn.valid_BS, MASK.bool())
    step = read(PAST, ids=IDS[:, :1], position_ids=torch.tensor([[3], [2]]))
    assert step.valid_BS is None and step.mask_BT.tolist() == [[True] * 4, [False, True, True, True]]


ONES = torch.ones(2, 6, dtype=torch.long)
BACK = torch.tensor([[1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
LATER = torch.tensor([[3, 4, 5], [2, 3, 4]])


@pytest.mark.parametrize(
    ("said", "past", "given"),
    [
        ("neither input_ids nor inputs_embeds", None, {"ids": None}),
        (r"input_ids are \(2, 0\): pass .*at least one token", None, {"ids": IDS[:, :0]}),
        ("right padding", None, {"attention_mask": MASK.flip(1)}),
        ("right padding", PAST, {"attention_mask": torch.cat([MASK, MASK.flip(1)], dim=1)}),
        ("other values than 1 and 0", None, {"attention_mask": MASK * 2}),
        ("all padding", None, {"attention_mask": MASK * torch.tensor([[1], [0]])}),
        ("real that were padding", PAST, {"attention_mask": ONES, "position_ids": LATER}),
        ("calls tokens padding that were read", PAST, {"attention_mask": BACK, "position_ids": LATER}),
        ("do not increase", None, {"position_ids": torch.tensor([[0, 1, 1]])}),
        ("do not increase", PAST, {"position_ids": torch.tensor([[2, 3, 4], [2, 3, 4]])}),
        ("holds 2 sequences, but the call has 1", PAST, {"ids": IDS[:1]}),
        (r"attention_mask is \(2, 3\), .* 2D mask \[2, 6\]", PAST, {"attention_mask": MASK}),
        (r"position_ids are \(1, 2\): pass \[2, 3\]", None, {"position_ids": torch.tensor([[0, 1]])}),
    ],
)
def test_what_would_go_wrong_silently_is_refused(said, past, given):
    refused(said, read, past, **given)
