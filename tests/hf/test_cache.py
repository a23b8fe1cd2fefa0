import gc
import weakref

import pytest
import torch

import retain
from retain.cache.store import SLACK
from retain.hf.cache.cache import Cache
from retain.hf.version_names import CACHE
from retain.kernels.ragged_attention.pages import PAGE
from tests.close import MODEL, assert_close
from tests.hf.masked import masked_logits, positions_of, random_keep
from tests.refused import refused
from tests.tiny import PLAIN, attached, tiny_batch, tiny_model

PADS = {1: (0,), 3: (0, 3, 11)}
both = pytest.mark.parametrize("batch", [1, 3])
every_family = pytest.mark.parametrize("family", PLAIN)


def choose(keep):
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
        logits.append(model(input_ids=ids, attention_mask=mask, **{CACHE: cache}, **where).logits)
        seen += ids.shape[1]
    return logits


def assert_same(family, actual, keep, chunks, attention_mask, **how):
    """Logits of real tokens are as near to the float64 oracle as the float32 oracle is (twice that, plus a
    floor)."""
    models = (tiny_model(family, dtype=dtype) for dtype in (torch.float64, torch.float32))
    reference, plain = (masked_logits(model, keep, chunks, attention_mask, **how) for model in models)
    masks = attention_mask.bool().split([ids.shape[1] for ids in chunks], dim=1)
    for got, want, same, real in zip(actual, reference, plain, masks, strict=True):
        assert_close(got[real], want[real], same[real], dtype=torch.float32)


@pytest.mark.parametrize("batch", [1, 3])
def test_direct_forward_without_position_ids(batch):
    model, (ids, mask) = attached("qwen3"), tiny_batch(PADS[batch])
    keep = random_keep(model, mask)
    chunks = [ids, *(torch.full((batch, 1), 9 + step) for step in range(4))]
    whole = torch.cat([mask, mask.new_ones(batch, 4)], dim=1)
    cache = Cache(model, policy=choose(keep))
    got = ragged_logits(model, cache, chunks, whole, positions=False)
    no_mask = Cache(model, policy=choose(keep))
    if batch == 1:
        with torch.no_grad():
            for chunk, logits in zip(chunks, got, strict=True):
                assert torch.equal(model(input_ids=chunk, **{CACHE: no_mask}).logits, logits)
    assert_same("qwen3", got, keep, chunks, whole, positions=False)
    assert torch.equal(cache.state.positions_BT[:, :5], torch.arange(5).expand(batch, 5))


def test_bytes_held_are_exact_and_dense_tensors_are_freed():
    model, (ids, mask) = attached("qwen3"), tiny_batch(PADS[3], 64)
    keep = random_keep(model, mask)
    seen = []

    def remember(evidence):
        seen.append((weakref.ref(evidence), evidence.keys_BHTD.untyped_storage()._cdata))
        dense.append(weakref.ref(evidence.keys_BHTD))
        return keep[evidence.layer_idx]

    dense: list = []
    cache = Cache(model, policy=remember).prefill(ids, mask)
    gc.collect()
    assert all(ref() is None for ref in dense) and all(ref() is None for ref, _ in seen)
    assert all(layer.keys is None and layer.values is None for layer in cache.layers)
    entry = 2 * 16 * 4
    kept = sum(int(layer.sum()) for layer in keep)
    report = cache.report()
    assert cache.bytes_held() == kept * entry
    assert cache.report().total.bytes_full == int(mask.sum()) * 2 * 3 * entry
    assert (
        report.total.entries_evicted == int(mask.sum()) * 2 * 3 - kept == cache.report().total.entries_evicted
    )
    stores = [layer.store for layer in cache.layers]
    storage = sum(
        s.keys_CD.untyped_storage().nbytes() + s.values_CD.untyped_storage().nbytes() for s in stores
    )
    # Slack of a row, rounded up to whole pages.
    assert kept * entry <= storage < (kept + 3 * 2 * 3 * (SLACK + PAGE)) * entry
    assert storage < cache.report().total.bytes_allocated < storage * 1.25
    assert "evicted" in str(report) and "plain PyTorch" in str(report) and "layer 2" in str(report)


def test_the_report_has_a_row_a_layer_and_the_repr_is_one_line():
    model, (ids, mask) = attached("qwen3"), tiny_batch((0, 3), 64)
    cache = Cache(model, policy="recency", keep_ratio=0.5)
    assert repr(cache) == "retain.Cache: policy recency, empty"
    report = cache.prefill(ids, mask).report()
    *rows, total = str(report).splitlines()[2:6]
    assert all(f"layer {idx} " in row for idx, row in enumerate(rows))
    assert total.strip().startswith("total ")
    assert int(total.split()[2]) == sum(int(row.split()[3]) for row in rows) == report.total.entries_held
    held = f"{report.total.entries_held} of {report.total.entries_seen} entries"
    assert repr(cache).startswith(f"retain.Cache: policy recency, 64 tokens seen, {held} and 0.0")


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
    model, (ids, mask) = attached("qwen3"), tiny_batch(PADS[3], 90)
    new, new_mask = question(3)
    keeps = [random_keep(model, mask, seed=seed) for seed in range(3)]
    for layer, kept in enumerate(keeps[2]):
        keeps[2][layer] = kept & (torch.arange(90) % 9 == 0)  # a far smaller ratio
    base = Cache(model, policy=None).prefill(ids, mask, evict=False, hold_evidence=True)
    alone = []
    for keep in keeps:
        cache = Cache(model, policy=choose(keep)).prefill(ids, mask)
        alone.append(decode(model, cache, mask, new, new_mask))
    forks = [base.fork().evict_with(keep) for keep in keeps]
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


def test_refusals_say_why():
    model, (ids, mask) = tiny_model("qwen3"), tiny_batch((0, 0), 12)
    taken = torch.ones(2, 14, dtype=torch.long)
    taken[1, 11] = 0
    with pytest.raises(ValueError, match="call retain.attach"), torch.no_grad():
        model(input_ids=ids, **{CACHE: Cache(model, policy=None)})
    with retain.attach(model), torch.no_grad():

        def made(**how):
            return Cache(model, policy=None).prefill(ids, mask, **how)

        cache, dense = made(), made(evict=False)
        other = Cache(model, policy=None).prefill(tiny_batch((0,), 25)[0])
        given = {"attention_mask": taken, CACHE: cache}
        refused("calls tokens padding that were read as tokens", model, ids[:, :2], **given)
        keep = torch.ones(2, 2, 12, dtype=torch.bool)
        for said, call in (
            ("already seen 12 tokens", lambda: cache.prefill(ids)),
            ("so pass evict=False with it", lambda: made(hold_evidence=True)),
            ("nothing is held densely", lambda: cache.evict_with([])),
            ("got 1 keep masks for 3 layers", lambda: dense.evict_with([keep])),
            (r"bool tensor \[2, 2, 12\]", lambda: dense.evict_with([keep[0]] * 3)),
            ("did you mean 'stream'", lambda: made(evict=False, hold_evidence=True, wanted=["streem"])),
            (r"are \(2, 0\): pass token ids", lambda: Cache(model, policy=None).prefill(ids[:, :0])),
            ("slack is -10: pass a whole number", lambda: Cache.concat([cache, cache], slack=-10)),
            (r"have seen \[12, 25\] tokens: left-pad", lambda: Cache.concat([cache, other])),
            ("keep_ratio can only be given with", lambda: Cache(model, policy=None, keep_ratio=0.5)),
        ):
            refused(said, call)
        assert all(layer.store is None and layer.keys is not None for layer in dense.layers)


@both
def test_keeping_everything_equals_the_full_cache(batch, family="qwen2"):
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
    assert cache.report().total.entries_evicted == 0 and cache.bytes_held() == cache.report().total.bytes_full
