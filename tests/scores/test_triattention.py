"""TriAttention against its published series, complex number by complex number;
and statistics of a file as its code publishes it."""

import cmath
import itertools
import math
import pickle
from dataclasses import replace

import pytest
import torch

import retain
from retain.attention.rotary import Rotary
from retain.budget.statement import Budget
from retain.hf.intercept.observe import observe
from retain.policy import decide_layers
from retain.scores import SCORES, triattention
from retain.scores.triattention import centres_of
from tests.naive import assert_heads_close, existing, naive_scores, query_heads, random_evidence
from tests.refused import refused
from tests.tiny import tiny_batch, tiny_model

PROTECTED = [
    *("protection.sinks=1", "protection.prefix_fraction=0", "protection.suffix_fraction=0"),
    *("protection.minimum=0", "protection.recent=2"),
]


def pairs(vector, F):
    return [complex(vector[f], vector[F + f]) for f in range(F)]


@pytest.mark.parametrize(("scaling", "furthest"), [(1.0, 9), (1.3, 64), (1.0, 1)])
def test_the_series_of_the_centre_and_the_length_of_what_scatters(scaling, furthest):
    """Six dimensions, of which RoPE turns four."""
    rotary = Rotary(torch.tensor([0.7, 0.1]), scaling)
    evidence = random_evidence((0, 3), head_width=6, rotary=rotary, dtype=torch.float64)
    frequencies, F = [float(w) for w in rotary.inverse_frequencies_F], 2
    plain_q = rotary.unrotate(evidence.queries_BQSD, evidence.positions_BT)
    plain_k = rotary.unrotate(evidence.keys_BHTD, evidence.positions_BT)
    distances = [2**n for n in range(furthest.bit_length())]

    def series(b, q):
        entries, h = existing(evidence, b), q // evidence.group
        seen = [plain_q[b, q, j].tolist() for j in entries]
        centre = [sum(column) / len(seen) for column in zip(*seen, strict=True)]
        lengths = [sum(abs(pairs(one, F)[f]) for one in seen) / len(seen) for f in range(F)]
        now, numbers = int(evidence.positions_BT[b, -1]) + 1, {}
        for i in entries:
            key, at = plain_k[b, h, i].tolist(), int(evidence.positions_BT[b, i])
            rest = sum(c * k for c, k in zip(centre[2 * F :], key[2 * F :], strict=True))
            found = []
            for d in distances:
                total = rest
                for c, k, w in zip(pairs(centre, F), pairs(key, F), frequencies, strict=True):
                    phase = w * (now + d - at) + cmath.phase(c) - cmath.phase(k)
                    total += abs(c) * abs(k) * math.cos(phase) * scaling**2
                found.append(total)
            scatter = zip(lengths, pairs(centre, F), pairs(key, F), strict=True)
            scattered = sum((m - abs(c)) * abs(k) * scaling**2 for m, c, k in scatter)
            numbers[i] = scattered + sum(found) / len(found)
        mean = sum(numbers.values()) / len(numbers)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in numbers.values()) / len(numbers))
        return {i: (x - mean) / deviation for i, x in numbers.items()}

    heads = {(b, q): series(b, q) for b, q in itertools.product(range(2), range(4))}
    naive = naive_scores(evidence, lambda b, h, i: max(heads[b, q][i] for q in query_heads(evidence, h)))
    got = triattention(evidence, furthest=furthest)
    assert_heads_close(got.values_BHT, naive, ops=4)


def publish(path, layers, **metadata):
    """A file of statistics as the released code writes it, of `centres_of` each layer."""
    stats = {}
    for layer, (centre_QD, length_QF) in layers.items():
        real_QF, imaginary_QF = centre_QD.chunk(2, -1)
        for head, parts in enumerate(zip(real_QF, imaginary_QF, length_QF, strict=True)):
            names = ("q_mean_real", "q_mean_imag", "q_abs_mean")
            stats[f"layer{layer:02d}_head{head:02d}"] = dict(zip(names, parts, strict=True))
    torch.save({"metadata": {"rope_style": "half", **metadata}, "stats": stats}, path)
    return str(path)


def test_statistics_of_a_file_stand_in_for_the_queries(tmp_path):
    rotary = Rotary(torch.tensor([0.3, 0.05]))
    evidence = random_evidence((0,), rotary=rotary, head_width=4)
    layers = {3: tuple(part[0] for part in centres_of(evidence))}
    path = publish(tmp_path / "stats.pt", layers)
    blank = replace(evidence, queries_BQSD=torch.full_like(evidence.queries_BQSD[:, :, -1:], float("nan")))
    want = triattention(evidence).values_BHT
    assert torch.equal(triattention(blank, centres=path).values_BHT, want)
    family = SCORES["triattention"]
    assert family.needs_with({"centres": path}) == {"rotary"} and "queries" in family.needs_with({})
    two = random_evidence((0, 3), rotary=rotary, head_width=4)
    alone = two.select_batch(slice(1, 2))
    in_two, by_itself = (triattention(shown, centres=path).values_BHT for shown in (two, alone))
    torch.testing.assert_close(in_two[1:], by_itself)
    refused("hold nothing for layer 4", triattention, replace(blank, layer_idx=4), centres=path)
    half = replace(blank, rotary=Rotary(torch.tensor([0.3])))
    refused("RoPE turns 2 of 4 numbers", triattention, half, centres=path)
    with pytest.raises(FileNotFoundError, match=r"scripts/calibrate.py .*, or leave centres out"):
        triattention(blank, centres="none.pt")
    refused("no rotary embedding", triattention, replace(evidence, rotary=None))
    refused("a sequence has none", triattention, random_evidence((0, 14), rotary=rotary))
    other = publish(tmp_path / "other.pt", layers, rope_style="interleaved")
    refused("rope_style is 'interleaved', and 'half' is read", triattention, blank, centres=other)
    (tmp_path / "code.pt").write_bytes(pickle.dumps(print, protocol=2))
    refused(
        "could not be read as TriAttention's statistics .Unpickl",
        triattention,
        blank,
        centres=str(tmp_path / "code.pt"),
    )


def test_a_cache_reads_the_statistics_of_its_model(tmp_path):
    model = tiny_model("llama")
    retain.attach(model)
    ids, _ = tiny_batch((0,), 60)
    shown = observe(model, ids)
    found = {layer.layer_idx: tuple(part[0] for part in centres_of(layer)) for layer in shown}
    path = publish(tmp_path / "stats.pt", found)
    few = {"sinks": 1, "prefix_fraction": 0.0, "suffix_fraction": 0.0, "minimum": 0, "recent": 2}
    settings = {"keep_ratio": 0.3, "protection": few, "observed_settings": {"centres": path}}
    cache = retain.Cache(model, "triattention", when="prefill+decode", every=4, **settings)
    model.generate(ids, past_key_values=cache, max_new_tokens=10)
    assert cache.report().total.entries_evicted > 0
    kept = retain.Cache(model, "triattention", **settings).prefill(ids).state.stores[1]
    (decided,) = decide_layers(
        retain.load_policy("triattention", [f"observed_settings.centres={path}", *PROTECTED]),
        [shown[1]],
        Budget(keep_ratio=0.3),
    )
    places = decided.keep_BHT.nonzero()[:, 2]
    assert kept.positions_C[kept.index_N()].tolist() == places.tolist()
    settings["observed_settings"] = {"centres": publish(tmp_path / "one.pt", {0: found[0]})}
    refused("hold nothing for layer 1.*for this model", retain.Cache, model, "triattention", **settings)
    changes = ["observed_settings.centres=3"]
    refused("path of a file, or null, got 3", retain.load_policy, "triattention", changes)
