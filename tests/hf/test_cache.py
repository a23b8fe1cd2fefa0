import copy
import gc
import weakref

import pytest
import torch
from transformers import DynamicCache

import retain
from retain.hf.cache.cache import Cache
from retain.kernels import backend
from retain.kernels.ragged_attention.pages import PAGE
from tests.close import MODEL, assert_close
from tests.hf.masked import masked, masked_logits, positions_of, random_keep
from tests.tiny import PAD, PLAIN, VOCAB, tiny_batch, tiny_model

PADS = {1: (0,), 3: (0, 3, 11)}
both = pytest.mark.parametrize("batch", [1, 3])
every_family = pytest.mark.parametrize("family", PLAIN)


def choose(keep):
    """A policy that keeps what a test chose."""
    return lambda evidence: keep[evidence.layer_idx]


def question(batch: int, num_tokens: int = 7, seed: int = 5):
    """A left-padded chunk of questions of different lengths, and its mask."""
    return tiny_batch(tuple(range(batch)), num_tokens, seed=seed)


@torch.no_grad()
def ragged_logits(model, cache, chunks, attention_mask, *, positions=True):
    logits, seen = [], cache.num_seen
    for ids in chunks:
        mask = attention_mask[:, : seen + ids.shape[1]]
        where = {"position_ids": positions_of(mask)[:, seen:]} if positions else {}
        logits.append(model(input_ids=ids, attention_mask=mask, past_key_values=cache, **where).logits)
        seen += ids.shape[1]
    return logits


def assert_same(family, actual, keep, chunks, attention_mask, **how):
    """Logits of real tokens are as near to the float64 oracle as the float32 oracle is (twice that, plus a
    floor)."""
    reference = masked_logits(tiny_model(family, dtype=torch.float64), keep, chunks, attention_mask, **how)
    plain = masked_logits(tiny_model(family), keep, chunks, attention_mask, **how)
    start = 0
    for got, want, same in zip(actual, reference, plain, strict=True):
        real = attention_mask[:, start : start + got.shape[1]].bool()
        assert_close(got[real], want[real], same[real], dtype=torch.float32)
        start += got.shape[1]


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@both
@every_family
def test_generate_equals_masked_full_cache(family, batch, attn):
    model = tiny_model(family, attn=attn)
    ids, mask = tiny_batch(PADS[batch])
    keep = random_keep(model, mask)
    settings = {
        "max_new_tokens": 20,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    everything = torch.cat([mask, mask.new_ones(batch, 20)], dim=1)
    with masked(model, keep, everything):
        want = model.generate(input_ids=ids, attention_mask=mask, **settings)
    plain = model.generate(input_ids=ids, attention_mask=mask, **settings)
    with retain.attach(model):
        cache = Cache(model, policy=choose(keep))
        got = model.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, **settings)
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.logits, want.logits, strict=True):
        assert_close(a, b, ops=MODEL)
    # The control: eviction that changed nothing would pass the above.
    assert max((a - b).abs().max() for a, b in zip(got.logits, plain.logits, strict=True)) > 0.1
    held = sum(int(kept.sum()) for kept in keep) + 19 * batch * keep[0].shape[1] * len(keep)
    assert cache.entries_held == held


@both
@every_family
def test_float64_agrees_to_float64_attention(family, batch):
    model = tiny_model(family, dtype=torch.float64)
    ids, mask = tiny_batch(PADS[batch])
    new, new_mask = question(batch)
    keep, whole = random_keep(model, mask), torch.cat([mask, new_mask], dim=1)
    with retain.attach(model):
        got = ragged_logits(model, Cache(model, policy=choose(keep)), [ids, new], whole)
    # Norms and RoPE of these models are float32 inside, so float32 is what two runs in float64 agree to.
    want = masked_logits(tiny_model(family, dtype=torch.float64), keep, [ids, new], whole)
    assert_close(got[1][new_mask.bool()], want[1][new_mask.bool()], dtype=torch.float32)


@both
@every_family
def test_question_chunk_after_a_context_then_tokens_then_a_second_turn(family, batch):
    model = tiny_model(family)
    ids, mask = tiny_batch(PADS[batch])
    keep = random_keep(model, mask)
    first, first_mask = question(batch)
    second, second_mask = question(batch, 5, seed=6)
    steps = [torch.full((batch, 1), 9 + step) for step in range(3)]
    chunks = [ids, first, *steps, second, *steps]
    ones = mask.new_ones(batch, 3)
    whole = torch.cat([mask, first_mask, ones, second_mask, ones], dim=1)
    with retain.attach(model):
        cache = Cache(model, policy=choose(keep))
        got = ragged_logits(model, cache, chunks, whole)
    assert_same(family, got, keep, chunks, whole)
    # Pads are never stored.
    tokens = int(first_mask.sum() + second_mask.sum()) + 6 * batch
    kept = sum(int(layer.sum()) for layer in keep)
    assert cache.entries_held == kept + tokens * keep[0].shape[1] * len(keep)
    assert cache.get_seq_length() == whole.shape[1]


@pytest.mark.parametrize("batch", [1, 3])
def test_direct_forward_without_position_ids(batch):
    model = tiny_model("qwen3")
    ids, mask = tiny_batch(PADS[batch])
    keep = random_keep(model, mask)
    chunks = [ids, *(torch.full((batch, 1), 9 + step) for step in range(4))]
    whole = torch.cat([mask, mask.new_ones(batch, 4)], dim=1)
    with retain.attach(model):
        cache = Cache(model, policy=choose(keep))
        got = ragged_logits(model, cache, chunks, whole, positions=False)
        no_mask = Cache(model, policy=choose(keep))
        if batch == 1:
            with torch.no_grad():
                for chunk, logits in zip(chunks, got, strict=True):
                    assert torch.equal(model(input_ids=chunk, past_key_values=no_mask).logits, logits)
    assert_same("qwen3", got, keep, chunks, whole, positions=False)
    assert torch.equal(cache.state.positions_BT[:, :5], torch.arange(5).expand(batch, 5))


@both
@every_family
def test_keeping_everything_equals_the_full_cache(family, batch):
    model = tiny_model(family)
    ids, mask = tiny_batch(PADS[batch])
    new, new_mask = question(batch)
    whole = torch.cat([mask, new_mask], dim=1)
    want = masked_logits(tiny_model(family, dtype=torch.float64), None, [ids, new], whole)[1][new_mask.bool()]
    plain = masked_logits(model, None, [ids, new], whole)[1][new_mask.bool()]
    with retain.attach(model):
        for cache in (Cache(model, policy=None), Cache(model, policy=None).prefill(ids, mask, evict=False)):
            chunks = [ids, new][bool(cache.num_seen) :]
            got = ragged_logits(model, cache, chunks, whole)
            assert_close(got[-1][new_mask.bool()], want, plain)
    assert cache.entries_evicted == 0 and cache.bytes_held() == cache.bytes_full()


@both
@every_family
def test_prefill_then_generate_continues_with_true_positions(family, batch):
    model = tiny_model(family)
    ids, mask = tiny_batch(PADS[batch])
    new, new_mask = question(batch)
    keep = random_keep(model, mask)
    whole, tokens = torch.cat([mask, new_mask], dim=1), torch.cat([ids, new], dim=1)
    settings = {"attention_mask": whole, "max_new_tokens": 8, "do_sample": False}
    everything = torch.cat([whole, whole.new_ones(batch, 8)], dim=1)
    full = DynamicCache(config=model.config)
    with masked(model, keep, everything), torch.no_grad():
        model(input_ids=ids, attention_mask=mask, position_ids=positions_of(mask), past_key_values=full)
        want = model.generate(input_ids=tokens, past_key_values=full, **settings)
    with retain.attach(model):
        cache = Cache(model, policy=choose(keep)).prefill(ids, mask)
        got = model.generate(input_ids=tokens, past_key_values=cache, **settings)
    assert torch.equal(got, want)
    # The control: eviction that changed nothing would pass the above.
    assert not torch.equal(got, model.generate(input_ids=tokens, **settings))
    last = positions_of(everything)[:, -2]
    assert torch.equal(cache.state.positions_BT[:, -1], last)
    for sequence in range(batch):
        positions = cache.layers[1].store.row(sequence, 1)[2]
        want_positions = positions_of(mask)[sequence][keep[1][sequence, 1]]
        assert torch.equal(positions[: want_positions.shape[0]], want_positions)


@pytest.mark.parametrize("num_beams", [3])
def test_beam_search_equals_masked_full_cache(num_beams):
    model = tiny_model("llama")
    ids, mask = tiny_batch((0, 5))
    keep = [layer.repeat_interleave(num_beams, dim=0) for layer in random_keep(model, mask)]
    everything = torch.cat([mask, mask.new_ones(2, 10)], dim=1).repeat_interleave(num_beams, dim=0)
    settings = {"max_new_tokens": 10, "num_beams": num_beams, "do_sample": False}
    with masked(model, keep, everything):
        want = model.generate(input_ids=ids, attention_mask=mask, **settings)
    with retain.attach(model):
        cache = Cache(model, policy=choose(keep))
        got = model.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, **settings)
    assert torch.equal(got, want)


@every_family
def test_a_second_turn_after_one_row_ended(family):
    """Two calls of `generate`, the second on a mask that hides the pads behind the row that had ended."""
    model = tiny_model(family)
    ids, mask = tiny_batch((0, 4))
    turn = question(2)[0]
    turn[:, :2] = 5  # no padding between an answer and the next turn
    settings = {"do_sample": False, "pad_token_id": PAD}
    free = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=9, **settings)[:, 40:].tolist()
    step, row = next(
        (i, r) for i in range(2, 6) for r in (0, 1) if free[r][i] not in free[r][:i] + free[1 - r]
    )
    settings["eos_token_id"] = free[row][step]

    def two_turns(cache):
        one = model.generate(
            input_ids=ids, attention_mask=mask, past_key_values=cache, max_new_tokens=9, **settings
        )
        own = torch.ones(2, 9, dtype=torch.long)
        own[row, step + 1 :] = 0
        assert one.shape == (2, 49) and bool((one[row, 40 + step + 1 :] == PAD).all())
        after = torch.cat([mask, own, torch.ones_like(turn)], dim=1)
        both_turns = torch.cat([one, turn], dim=1)
        return model.generate(
            input_ids=both_turns, attention_mask=after, past_key_values=cache, max_new_tokens=6, **settings
        ), after

    want, after = two_turns(DynamicCache(config=model.config))
    with retain.attach(model):
        cache = Cache(model, policy=None)
        got, _ = two_turns(cache)
    assert torch.equal(got, want)
    # Of the pads none is held any more; those that the second turn put behind a finished row still are.
    seen = int(after.sum()) + 2 * (got.shape[1] - after.shape[1] - 1)
    assert cache.entries_held == cache.entries_seen == seen * 2 * len(cache.layers)


def test_pads_that_generate_put_behind_a_finished_row_are_let_go():
    model = tiny_model("qwen2")
    ids, mask = tiny_batch((0, 4))
    keep = random_keep(model, mask)
    answer = torch.tensor([[5, 6, 7, 8], [5, PAD, PAD, PAD]])
    turn, turn_mask = question(2)
    during = torch.cat([mask, torch.ones(2, 4, dtype=torch.long)], dim=1)
    after = torch.cat([mask, (answer != PAD).long(), turn_mask], dim=1)
    where = positions_of(after)[:, -turn.shape[1] :]  # those of the finished row go on behind its last token
    # What the full cache says when the second turn's mask hides the pads.
    full = DynamicCache(config=model.config)
    with retain.attach(model), torch.no_grad():
        cache = Cache(model, policy=choose(keep))
        ragged_logits(model, cache, [ids, answer[:, :1], answer[:, 1:]], during)
        held = cache.entries_held
        got = model(input_ids=turn, attention_mask=after, position_ids=where, past_key_values=cache).logits
        assert cache.entries_held == held + (int(turn_mask.sum()) - 3) * 2 * 3
        with pytest.raises(ValueError, match="position_ids of a sequence do not increase"):
            again, ones = turn[:, :1], after.new_ones(2, 1)
            model(
                input_ids=again,
                attention_mask=torch.cat([after, ones], dim=1),
                position_ids=where[:, -1:],
                past_key_values=cache,
            )
    with masked(model, keep, after), torch.no_grad():
        for chunk, upto in ((ids, mask), (answer, during)):
            old = full.get_seq_length()
            model(
                input_ids=chunk,
                attention_mask=upto,
                position_ids=positions_of(upto)[:, old:],
                past_key_values=full,
            )
        reference = model(
            input_ids=turn, attention_mask=after, position_ids=where, past_key_values=full
        ).logits
    assert_close(got[turn_mask.bool()], reference[turn_mask.bool()], ops=MODEL)
    # Positions that go back behind what stays are refused as before.
    with retain.attach(model), torch.no_grad():
        cache = Cache(model, policy=choose(keep))
        ragged_logits(model, cache, [ids, answer[:, :1], answer[:, 1:]], during)
        with pytest.raises(ValueError, match="position_ids of a sequence do not increase"):
            model(input_ids=turn, attention_mask=after, position_ids=where - 1, past_key_values=cache)


def test_bytes_held_are_exact_and_dense_tensors_are_gone():
    model = tiny_model("qwen3")
    ids, mask = tiny_batch(PADS[3], 64)
    keep = random_keep(model, mask)
    seen = []

    def remember(evidence):
        seen.append((weakref.ref(evidence), evidence.keys_BHTD.untyped_storage()._cdata))
        dense.append(weakref.ref(evidence.keys_BHTD))
        return keep[evidence.layer_idx]

    dense: list = []
    with retain.attach(model):
        cache = Cache(model, policy=remember, slack=4).prefill(ids, mask)
    gc.collect()
    assert all(ref() is None for ref in dense) and all(ref() is None for ref, _ in seen)
    assert all(layer.keys is None and layer.values is None for layer in cache.layers)
    entry = 2 * 16 * 4
    kept = sum(int(layer.sum()) for layer in keep)
    report = cache.report()
    assert cache.bytes_held() == kept * entry
    assert cache.bytes_full() == int(mask.sum()) * 2 * 3 * entry
    assert report.total.entries_evicted == int(mask.sum()) * 2 * 3 - kept == cache.entries_evicted
    stores = [layer.store for layer in cache.layers]
    storage = sum(
        s.keys_CD.untyped_storage().nbytes() + s.values_CD.untyped_storage().nbytes() for s in stores
    )
    # Slack of 4 a row, rounded up to whole pages.
    assert kept * entry <= storage < (kept + 3 * 2 * 3 * (4 + PAGE)) * entry
    assert storage < cache.bytes_allocated() < storage * 1.25
    assert "evicted" in str(report) and "plain PyTorch" in str(report) and "layer 2" in str(report)


def test_the_report_says_which_path_attention_takes():
    ids, mask = tiny_batch((0, 3))
    model = tiny_model("qwen3")
    with retain.attach(model):
        cache, dense = Cache(model, policy=None), Cache(model, policy=None)
        assert "attention: nothing is held yet" in str(cache.report())
        dense.prefill(ids, mask, evict=False)
        cache.prefill(ids, mask)
    assert cache.report().path == dense.report().path == "plain PyTorch over ragged rows"
    with backend.using("triton"):
        assert cache.report().path == dense.report().path == "Triton kernels over ragged rows"


def test_each_layer_is_cut_before_the_next_one_runs():
    model = tiny_model("qwen3")
    ids, mask = tiny_batch((0,), 64)
    dense_layers = []

    def count(evidence):
        dense_layers.append(sum(layer.keys is not None for layer in cache.layers))
        return evidence.valid_BT[:, None].expand(-1, 2, -1).clone()

    with retain.attach(model):
        cache = Cache(model, policy=count)
        cache.prefill(ids, mask)
    assert dense_layers == [1, 1, 1]


@torch.no_grad()
def decode(model, cache, mask, new, new_mask, steps=6):
    """Greedy tokens and logits of a question on a prefilled cache."""
    whole, logits = torch.cat([mask, new_mask], dim=1), []
    ids = new
    for _ in range(steps):
        logits.append(ragged_logits(model, cache, [ids], whole)[0][:, -1])
        ids = logits[-1].argmax(-1, keepdim=True)
        whole = torch.cat([whole, whole.new_ones(whole.shape[0], 1)], dim=1)
    return torch.stack(logits, dim=1)


def test_forks_and_their_concat_decode_as_each_alone():
    model = tiny_model("qwen3")
    ids, mask = tiny_batch(PADS[3], 90)
    new, new_mask = question(3)
    keeps = [random_keep(model, mask, seed=seed) for seed in range(3)]
    for layer, kept in enumerate(keeps[2]):
        keeps[2][layer] = kept & (torch.arange(90) % 9 == 0)  # a far smaller ratio
    with retain.attach(model):
        base = Cache(model, policy=None).prefill(ids, mask, evict=False, hold_evidence=True)
        alone = []
        for keep in keeps:
            cache = Cache(model, policy=choose(keep)).prefill(ids, mask)
            alone.append(decode(model, cache, mask, new, new_mask))
        forks = [base.fork().evict_with(keep) for keep in keeps]
        forks[1] = base.fork().evict(choose(keeps[1]))
        stacked = Cache.concat([*forks, base])
        repeat = [t.repeat(4, 1) for t in (mask, new, new_mask)]
        together = decode(model, stacked, *repeat)
        for number, fork in enumerate(forks):
            one = decode(model, fork, mask, new, new_mask)
            assert_close(one, alone[number], ops=MODEL)
            assert_close(together[3 * number : 3 * number + 3], alone[number], ops=MODEL)
        full = Cache(model, policy=None).prefill(ids, mask)
        assert_close(together[9:], decode(model, full, mask, new, new_mask))
        assert base.evidence is not None and len(base.evidence) == 3  # decoding forks left the base alone
        assert all(layer.store is None for layer in base.layers)


def test_generate_on_a_concat_equals_generate_on_each():
    model = tiny_model("llama")
    ids, mask = tiny_batch(PADS[3])
    new, new_mask = question(3)
    tokens, whole = torch.cat([ids, new], dim=1), torch.cat([mask, new_mask], dim=1)
    settings = {"max_new_tokens": 8, "do_sample": False}
    with retain.attach(model):
        base = Cache(model, policy=None).prefill(ids, mask, evict=False)
        forks = [base.fork().evict_with(random_keep(model, mask, seed=seed)) for seed in (0, 1)]
        stacked = Cache.concat(forks)
        got = model.generate(
            input_ids=tokens.repeat(2, 1),
            attention_mask=whole.repeat(2, 1),
            past_key_values=stacked,
            **settings,
        )
        for number, fork in enumerate(forks):
            one = model.generate(input_ids=tokens, attention_mask=whole, past_key_values=fork, **settings)
            assert torch.equal(got[3 * number : 3 * number + 3], one)


def test_crop_asks_a_second_question_of_the_same_context():
    model = tiny_model("qwen2")
    ids, mask = tiny_batch(PADS[3])
    keep = random_keep(model, mask)
    with retain.attach(model):
        cache = Cache(model, policy=choose(keep)).prefill(ids, mask)
        held, bytes_held = cache.entries_held, cache.bytes_held()
        for seed in (5, 8):
            new, new_mask = question(3, seed=seed)
            fresh = decode(model, cache.fork(), mask, new, new_mask)
            assert_close(decode(model, cache, mask, new, new_mask), fresh, ops=MODEL)
            cache.crop(ids.shape[1]) if seed == 5 else cache.crop(ids.shape[1] - cache.num_seen)
            assert (cache.entries_held, cache.bytes_held()) == (held, bytes_held)
            assert cache.get_seq_length() == ids.shape[1]
    with pytest.raises(ValueError, match=r"back to 10: entries were evicted when it had seen 40.*fork\(\)"):
        cache.crop(10)
    assert (cache.entries_held, cache.num_seen) == (held, 40)
    cache.crop(0)
    assert cache.num_seen == 0 and cache.entries_held == 0


@pytest.mark.parametrize("evict_first", [True, False])
def test_selecting_and_repeating_sequences(evict_first):
    model = tiny_model("qwen3")
    ids, mask = tiny_batch(PADS[3], 70)
    new, new_mask = question(3)
    keep = random_keep(model, mask)
    idx = torch.tensor([2, 0])
    with retain.attach(model):
        whole = Cache(model, policy=choose(keep), seeds=[7, 8, 9]).prefill(ids, mask)
        want = decode(model, whole, mask, new, new_mask)
        cache = Cache(model, policy=None, seeds=[7, 8, 9]).prefill(ids, mask, evict=False, hold_evidence=True)
        if evict_first:
            cache.evict(choose(keep))
        cache.batch_select_indices(idx)
        assert cache.state.seeds == [9, 7]
        if not evict_first:
            cache.evict(choose([layer[idx] for layer in keep]))
        twice = copy.deepcopy(cache)
        twice.batch_repeat_interleave(2)
        assert twice.batch_size == 4 and twice.bytes_held() == 2 * cache.bytes_held()
        assert_close(decode(model, cache, mask[idx], new[idx], new_mask[idx]), want[idx], ops=MODEL)
        idx = idx.repeat_interleave(2)
        assert_close(decode(model, twice, mask[idx], new[idx], new_mask[idx]), want[idx], ops=MODEL)


def test_two_conversations_on_one_model_do_not_disturb_each_other():
    model = tiny_model("llama")
    batches = [tiny_batch((0, 3), 40, seed=1), tiny_batch((5,), 25, seed=2)]
    keeps = [random_keep(model, mask) for _, mask in batches]
    news = [question(2), question(1)]
    with retain.attach(model):
        alone = []
        for (ids, mask), keep, new in zip(batches, keeps, news, strict=True):
            alone.append(decode(model, Cache(model, policy=choose(keep)).prefill(ids, mask), mask, *new))
        caches = [Cache(model, policy=choose(keep)) for keep in keeps]
        for cache, (ids, mask) in zip(caches, batches, strict=True):
            cache.prefill(ids, mask)
        logits: list[list[torch.Tensor]] = [[], []]
        wholes = [torch.cat([mask, new[1]], dim=1) for (_, mask), new in zip(batches, news, strict=True)]
        ids = [new[0] for new in news]
        for _ in range(6):
            for one in (0, 1):
                logits[one].append(ragged_logits(model, caches[one], [ids[one]], wholes[one])[0][:, -1])
                ids[one] = logits[one][-1].argmax(-1, keepdim=True)
                wholes[one] = torch.cat([wholes[one], wholes[one].new_ones(wholes[one].shape[0], 1)], dim=1)
    for one in (0, 1):
        assert_close(torch.stack(logits[one], dim=1), alone[one], ops=MODEL)


def test_refusals_say_why():
    model = tiny_model("qwen3")
    ids, mask = tiny_batch((0, 0), 12)
    with pytest.raises(ValueError, match="call retain.attach"), torch.no_grad():
        model(input_ids=ids, past_key_values=Cache(model, policy=None))
    with retain.attach(model), torch.no_grad():
        right = mask.clone()
        right[1, 9:] = 0
        with pytest.raises(ValueError, match="right padding.*padding_side = 'left'"):
            model(input_ids=ids, attention_mask=right, past_key_values=Cache(model, policy=None))
        with pytest.raises(ValueError, match="all padding"):
            model(
                input_ids=ids,
                attention_mask=mask * torch.tensor([[1], [0]]),
                past_key_values=Cache(model, policy=None),
            )
        with pytest.raises(ValueError, match="packed sequences"):
            model(
                input_ids=ids,
                position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]]),
                past_key_values=Cache(model, policy=None),
            )
        cache = Cache(model, policy=None).prefill(ids, mask)
        with pytest.raises(
            ValueError, match=r"attention_mask is \(2, 1\).*seen 12 tokens and 1 are new.*\[2, 13\]"
        ):
            model(input_ids=ids[:, :1], attention_mask=mask[:, :1], past_key_values=cache)
        with pytest.raises(ValueError, match="holds 2 sequences, but the call has 1"):
            model(input_ids=ids[:1, :1], past_key_values=cache)
        padded = torch.cat([tiny_batch((0, 4), 12)[1], mask.new_ones(2, 1)], dim=1)
        left = Cache(model, policy=None).prefill(*tiny_batch((0, 4), 12))
        with pytest.raises(ValueError, match="real that were padding"):
            model(input_ids=ids[:, :1], attention_mask=torch.ones_like(padded), past_key_values=left)
        with pytest.raises(ValueError, match="already seen 12 tokens"):
            cache.prefill(ids)
        with pytest.raises(ValueError, match="pass evict=False too"):
            Cache(model, policy=None).prefill(ids, hold_evidence=True)
        with pytest.raises(ValueError, match="nothing is held densely"):
            cache.evict_with([])
        with pytest.raises(ValueError, match="no evidence"):
            cache.evict(policy=choose([]))
        dense = Cache(model, policy=None).prefill(ids, mask, evict=False)
        with pytest.raises(ValueError, match="got 1 keep masks for 3 layers"):
            dense.evict_with([torch.ones(2, 2, 12, dtype=torch.bool)])
        with pytest.raises(ValueError, match=r"bool tensor \[2, 2, 12\]"):
            dense.evict_with([torch.ones(2, 12, dtype=torch.bool)] * 3)
        with pytest.raises(ValueError, match=r"have seen \[12, 25\] tokens: left-pad"):
            Cache.concat([cache, Cache(model, policy=None).prefill(tiny_batch((0,), 25)[0])])
        with pytest.raises(ValueError, match="keep_ratio can only be given with a named policy"):
            Cache(model, policy=None, keep_ratio=0.5)


@pytest.mark.parametrize("how", ["prompt_lookup_num_tokens", "assistant_model"])
def test_assisted_decoding_is_refused_before_any_work(how):
    model, cache = tiny_model("qwen3"), None
    value = 2 if how == "prompt_lookup_num_tokens" else tiny_model("qwen3")
    ids = tiny_batch((0,), 12)[0]
    with retain.attach(model):
        cache = Cache(model, policy=None)
        with pytest.raises(
            ValueError, match=f"^{how}.*assisted decoding, which does not work with retain.Cache"
        ):
            model.generate(input_ids=ids, past_key_values=cache, max_new_tokens=4, **{how: value})
    assert cache.num_seen == 0


def test_a_forward_that_broke_off():
    model = tiny_model("qwen3")
    ids, mask = tiny_batch((0,), 12)
    calls = []

    def fail_once(evidence):
        calls.append(evidence.layer_idx)
        if len(calls) == 2:
            raise RuntimeError("boom")
        return evidence.valid_BT[:, None].expand(-1, 2, -1).clone()

    with retain.attach(model), torch.no_grad():
        cache = Cache(model, policy=fail_once)
        with pytest.raises(RuntimeError, match="boom"):
            cache.prefill(ids, mask)
        got = cache.prefill(ids, mask)
        assert got.entries_held == 12 * 2 * 3
        hook = model.model.layers[1].register_forward_pre_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(input_ids=ids[:, :1], past_key_values=cache)
        hook.remove()
        with pytest.raises(ValueError, match="broke off"):
            model(input_ids=ids[:, :1], past_key_values=cache)


def test_growth_over_many_tokens_stays_exact():
    model = tiny_model("llama")
    ids, mask = tiny_batch((0, 6), 30)
    keep = random_keep(model, mask)
    generator = torch.Generator().manual_seed(3)
    steps = list(torch.randint(2, VOCAB, (40, 2, 1), generator=generator))
    whole = torch.cat([mask, mask.new_ones(2, 40)], dim=1)
    with retain.attach(model):
        cache = Cache(model, policy=choose(keep), slack=1)
        got = ragged_logits(model, cache, [ids, *steps], whole)
    assert_same("llama", got, keep, [ids, *steps], whole)
