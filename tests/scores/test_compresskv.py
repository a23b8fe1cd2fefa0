"""CompressKV: the vote of a layer's retrieval heads, and shares of layers by their errors, in plain loops."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import retain
from retain.budget.statement import Budget
from retain.policy import decide_layers, load_policy, plan_of, shape_of
from retain.scores import SCORES, compresskv
from tests.evictions import FIXED, make_evidence
from tests.naive import assert_heads_close, existing, naive_attention, random_evidence
from tests.refused import refused
from tests.tiny import tiny_batch, tiny_model


@pytest.fixture
def table(tmp_path):
    """Retrieval heads of layer 3: the last, the first, of two equal ones the lower, the other."""
    path = tmp_path / "retrieval_heads.tsv"
    path.write_text("# layers 1 3\n0\t0\t0\t0\n0.5\t0.2\t0.2\t0.9\n")
    return str(path)


@pytest.mark.parametrize("pool", ["avg", "max", None])
@pytest.mark.parametrize(("num_voters", "voters"), [(1, [3]), (2, [3, 0]), (3, [3, 0, 1]), (9, [0, 1, 2, 3])])
def test_the_vote_of_retrieval_heads(table, pool, num_voters, voters):
    evidence, window, size = random_evidence((0, 3), dtype=torch.float64), 4, 3
    attention, T = naive_attention(evidence), evidence.num_seen
    naive = torch.full((2, 2, T), float("-inf"), dtype=torch.float64)
    for b in range(2):
        for i in existing(evidence, b):
            segment = range(T - window) if i < T - window else range(T - window, T)
            near = [k for k in range(i - size // 2, i + size // 2 + 1) if k in segment] if pool else [i]
            total = 0.0
            for q in voters:
                found = [
                    sum(float(attention[b, q, j, k]) for j in range(T - window, T)) / window for k in near
                ]
                total += max(found) if pool == "max" else sum(found) / (size if pool else 1)
            naive[b, :, i] = total / len(voters)
    how = {"window": window, "pool": pool, "pool_size": size, "num_voters": num_voters}
    score = compresskv(evidence, retrieval_heads=table, **how)
    assert score.unit == "mass" and score.window == window
    assert_heads_close(score.values_BHT, naive)
    if len(voters) == 4:
        assert torch.equal(compresskv(evidence, **how).values_BHT, score.values_BHT)


def test_a_table_of_another_model_is_refused(table):
    evidence = random_evidence((0,))
    missing = replace(evidence, layer_idx=2)
    refused("hold 0 numbers for layer 2, which shows 4", compresskv, missing, retrieval_heads=table)
    wide = random_evidence((0,), group=4)
    refused("hold 4 numbers for layer 3, which shows 8", compresskv, wide, retrieval_heads=table)
    with pytest.raises(FileNotFoundError, match="--table retrieval_heads measures one"):
        compresskv(evidence, retrieval_heads="none.tsv")
    assert SCORES["compresskv"].needs == {"window"}


def naive_layers(errors, mean, protected, room, least, most):
    """Entries a head of each layer, not rounded: a floor, then the rest by error, cut at the cap until none
    is above it."""
    floor, cap = max(protected, min(least, mean)), min(protected + room, most * mean)
    rest, full = (mean - floor) * len(errors), set()
    while True:
        whole = sum(error for idx, error in enumerate(errors) if idx not in full)
        left = rest - (cap - floor) * len(full)
        open_to = [idx for idx in range(len(errors)) if idx not in full]
        shares = {idx: left * errors[idx] / whole if whole else left / len(open_to) for idx in open_to}
        above = {idx for idx, share in shares.items() if floor + share > cap + 1e-9}
        if not above:
            return [cap if idx in full else floor + shares[idx] for idx in range(len(errors))]
        full |= above


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_layers_share_by_error_exactly(tmp_path_factory, data):
    errors = data.draw(st.lists(st.sampled_from([0.01, 0.2, 0.5, 1.0]), min_size=3, max_size=3))
    path = tmp_path_factory.mktemp("errors") / "errors.tsv"
    path.write_text("".join(f"{error}\n" for error in errors))
    tokens, mean = 60, data.draw(st.integers(4, 60))
    least, most = data.draw(st.sampled_from([0, 8, 40])), data.draw(st.sampled_from([1.0, 1.5, 3.0]))
    changes = ["observed_settings.retrieval_heads=null", f"allocation.layer_errors={path}"]
    changes += [f"allocation.layer_least={least}", f"allocation.layer_most={most}"]
    policy = replace(load_policy("compresskv", changes), protection=FIXED)
    layers = make_evidence(1, 2, tokens, (0,), num_layers=3)
    shapes = [shape_of(layer) for layer in layers]
    plan = plan_of(policy, Budget(tokens_per_head=mean), layers[0].valid_BT, shapes)
    fixed_L = [row[0] for row in plan.shares.fixed_LB]
    assert sum(fixed_L) == 3 * 2 * mean
    want = naive_layers(errors, mean, 3, tokens - 3, least, most)
    for got, own in zip(fixed_L, want, strict=True):
        assert abs(got - 2 * own) < 2 + 1e-6  # a cap is whole entries a head
    keeps = [one.keep_BHT for one in decide_layers(policy, layers, Budget(tokens_per_head=mean))]
    for keep_BHT, share in zip(keeps, fixed_L, strict=True):
        assert int(keep_BHT.sum()) == share
        # One set, and at most one token more in the first.
        assert not (keep_BHT[0, 1] & ~keep_BHT[0, 0]).any()
        assert int((keep_BHT[0, 0] ^ keep_BHT[0, 1]).sum()) == share % 2


def test_what_contradicts_is_said():
    alone = ["allocation.layer_errors=null"]
    refused("'errors' shares by a table, .* state both, or none", load_policy, "compresskv", alone)
    other = ["allocation.layer_errors=x.tsv"]
    refused("'errors' shares by a table, .* state both, or none", load_policy, "snapkv", other)
    both = ["allocation.head_classes=x.tsv"]
    refused("head_classes and head_importance both state", load_policy, "headkv", both)
    refused("head_importance states each head's budget: take scope", load_policy, "headkv", ["scope=layer"])


@pytest.mark.parametrize("name", ["headkv", "compresskv"])
def test_a_cache_holds_the_budget_to_the_entry(tmp_path, name):
    """In a cascade as at once, in entries and in bytes, and again while it decodes; tables of query heads."""
    model = tiny_model()
    retain.attach(model)
    heads, layers = str(tmp_path / "heads.tsv"), str(tmp_path / "layers.tsv")
    rows = torch.rand(3, 6, generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "heads.tsv").write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    (tmp_path / "layers.tsv").write_text("0.2\n1.0\n0.4\n")
    tables = {"head_importance": heads, "retrieval_heads": heads, "layer_errors": layers}
    policy = replace(load_policy(name).with_tables(tables), protection=FIXED)
    ids, mask = tiny_batch((0, 20), 100)
    held = []
    for budget in ({"keep_ratio": 0.4}, {"tokens_per_head": 40}, {"bytes": 40 * 6 * 2 * 16 * 4}):
        cache = retain.Cache(model, policy, **budget).prefill(ids, mask)
        held.append(cache.budgets().held_BLH)
    assert held[0].sum((1, 2)).tolist() == [40 * 6, 32 * 6] and held[1].sum((1, 2)).tolist() == [240, 240]
    assert held[2].sum((1, 2)).tolist() == [240, 240]
    if name == "compresskv":  # 32 for each, 24 by error; of the second, 32 is all
        assert held[0].tolist() == [[[35, 35], [47, 47], [38, 38]], [[32, 32]] * 3]
    else:
        assert (held[0].amax((1, 2)) > held[0].amin((1, 2)) + 2).all()
    for ratio in (0.4, 0.5):  # at a half, what the layer of the largest error is due grows faster than it can
        cache = retain.Cache(model, policy, keep_ratio=ratio, regime="prefill+decode", every=4)
        model.generate(ids[:1], past_key_values=cache, max_new_tokens=9)
        assert cache.evictions > 1
        since = cache.num_seen - cache.state.evicted_at
        assert cache.entries_held == 6 * int(ratio * cache.state.evicted_at) + 6 * since
    (tmp_path / "heads.tsv").write_text("0.5\t0.5\t0.5\n" * 3)
    refused("pass the table of this model", retain.Cache, model, policy, keep_ratio=0.4)
