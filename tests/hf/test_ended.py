"""What `generate` puts behind a sequence that has ended: tokens like all others, until a later turn's mask
takes them back."""

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

import retain
from retain.hf.cache.cache import Cache
from retain.hf.version_names import CACHE
from tests.hf.test_generate import After, whole_mask
from tests.tiny import PAD, tiny_batch, tiny_model

END, NEW = 95, 12
HOW = {"do_sample": False, "pad_token_id": PAD, "max_new_tokens": NEW}


def ends_at(*lengths):
    """A stopping criterion for each sequence's own length."""
    return StoppingCriteriaList([After(list(lengths))])


@pytest.mark.parametrize("pads", [(0, 3), (0, 0)])
@pytest.mark.parametrize("way", ["prefill", "turn"])
def test_what_a_prompt_holds_is_no_end(way, pads):
    """Its last token ends sequences, and is read alone: behind a prefill, or closing a turn."""
    model = tiny_model("qwen3")
    ids, mask = tiny_batch(pads)
    ids[:, -1] = END
    how = {**HOW, "suppress_tokens": [END], "eos_token_id": END}

    def run(cache):
        if way == "prefill":
            where = (mask.cumsum(-1) - 1).clamp_min(0)[:, :-1]
            given = {"attention_mask": mask[:, :-1], "position_ids": where}
            with torch.no_grad():
                model.model(input_ids=ids[:, :-1], **{CACHE: cache}, **given)
        out = model.generate(ids, attention_mask=mask, **{CACHE: cache}, **how)
        if way == "turn":  # the answer's last token, which nobody has read, is replaced by the end
            out = torch.cat([out[:, :-1], torch.full((2, 1), END)], dim=1)
            whole = whole_mask(mask, NEW)
            out = model.generate(out, attention_mask=whole, **{CACHE: cache}, **how)
        return out

    want = run(DynamicCache(config=model.config))
    with retain.attach(model):
        cache = Cache(model, policy="snapkv", keep_ratio=1.0, regime="prefill+decode", every=4)
        assert torch.equal(run(cache), want)
    turns = 2 if way == "turn" else 1
    assert cache.num_seen == 40 + turns * NEW - 1
    assert bool(cache.state.valid_BT[:, 40:].all()) and torch.equal(cache.state.valid_BT[:, :40], mask.bool())
    assert cache.entries_held == cache.entries_seen == int(cache.state.valid_BT.sum()) * 2 * 3


def without_full_masks(module, args, kwargs):
    """What transformers does from 5.23 on: no mask is passed where nothing is masked."""
    mask = kwargs.get("attention_mask")
    return args, {**kwargs, "attention_mask": None if mask is None or bool(mask.all()) else mask}


class Says(LogitsProcessor):
    """Each sequence says the end when it has its own length, and not before."""

    def __init__(self, *lengths):
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids, scores):
        says_B = input_ids.shape[1] >= self.lengths - 1
        scores[:, PAD] = -torch.inf
        scores[:, END] = torch.where(says_B, torch.inf, -torch.inf)
        return scores


@pytest.mark.parametrize("way", ["no end", "beams"])
def test_all_that_generate_reads_is_stored(way):
    model = tiny_model("qwen3")
    ids, mask = tiny_batch((0, 3))
    how = {**HOW, "attention_mask": mask, "max_new_tokens": 6}
    if way == "no end":
        model.generation_config.eos_token_id = END
        how |= {"eos_token_id": None, "stopping_criteria": ends_at(43, 99)}
        how["logits_processor"] = LogitsProcessorList([Says(42, 44)])
    else:
        end = int(model.generate(ids, num_beams=2, **how)[0, 42])
        how |= {"eos_token_id": end, "num_beams": 2, "length_penalty": 4.0}
    full = DynamicCache(config=model.config)
    want = model.generate(ids, **{CACHE: full}, **how)
    with retain.attach(model):
        cache = Cache(model, policy=None)
        got = model.generate(ids, **{CACHE: cache}, **how)
    assert torch.equal(got, want) and cache.num_seen == full.get_seq_length()
    assert bool(cache.state.valid_BT[:, 40:].all())


def test_a_next_turn_says_what_was_fill():
    """Its mask takes the pads behind an end back, and then the answer is that of a masked full cache."""
    model = tiny_model("qwen3")
    ids, mask = tiny_batch((0, 0))
    how = {**HOW, "eos_token_id": END, "logits_processor": LogitsProcessorList([Says(43, 99)])}
    with retain.attach(model):
        cache = Cache(model, policy=None)
        one = model.generate(ids, attention_mask=mask, **{CACHE: cache}, **how)
        turn = torch.cat([one, ids[:, :5]], dim=1)
        assert cache.num_seen == 51 and cache.entries_held == 2 * 51 * 2 * 3
        own = torch.cat([mask, (one[:, 40:] != PAD).long(), mask[:, :5]], dim=1)
        del how["logits_processor"]
        got = model.generate(turn, attention_mask=own, **{CACHE: cache}, **how)
        want = model.generate(turn, attention_mask=own, **{CACHE: DynamicCache(config=model.config)}, **how)
        assert torch.equal(got, want) and cache.entries_held == int(cache.state.valid_BT.sum()) * 2 * 3
        assert int(cache.state.valid_BT[0].sum()) == int(cache.state.valid_BT[1].sum()) - 9
