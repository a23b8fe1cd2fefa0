"""TriAttention against its published series, complex number by complex number; and centres of a file."""

import cmath
import itertools
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import retain
from retain.attention.rotary import Rotary
from retain.budget.statement import Budget
from retain.eval.diagnose.query_centres import main, measure_query_centres
from retain.hf.intercept.observe import observe
from retain.policy import decide_layers
from retain.reference.documents import Document
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


@pytest.mark.parametrize("over", ["mean", "max"])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("scaling", "furthest"), [(1.0, 9), (1.3, 64), (1.0, 1)])
def test_the_series_of_the_centre_and_the_length_of_what_scatters(over, normalise, scaling, furthest):
    """Six dimensions, of which RoPE turns four."""
    rotary = Rotary(torch.tensor([0.7, 0.1]), scaling)
    evidence = random_evidence((0, 3), head_width=6, rotary=rotary, dtype=torch.float64)
    frequencies, F = [float(w) for w in rotary.inverse_frequencies_F], 2
    plain_q = rotary.unrotate(evidence.queries_BQSD, evidence.positions_BT)
    plain_k = rotary.unrotate(evidence.keys_BHTD, evidence.positions_BT)
    distances = [2**n for n in range(furthest.bit_length())]

    def series(b, q):
        own, h = existing(evidence, b), q // evidence.group
        seen = [plain_q[b, q, j].tolist() for j in own]
        centre = [sum(column) / len(seen) for column in zip(*seen, strict=True)]
        lengths = [sum(abs(pairs(one, F)[f]) for one in seen) / len(seen) for f in range(F)]
        now, numbers = int(evidence.positions_BT[b, -1]) + 1, {}
        for i in own:
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
            beside = sum((m - abs(c)) * abs(k) * scaling**2 for m, c, k in scatter)
            numbers[i] = beside + (max(found) if over == "max" else sum(found) / len(found))
        if normalise:
            mean = sum(numbers.values()) / len(numbers)
            deviation = math.sqrt(sum((x - mean) ** 2 for x in numbers.values()) / len(numbers))
            numbers = {i: (x - mean) / deviation for i, x in numbers.items()}
        return numbers

    heads = {(b, q): series(b, q) for b, q in itertools.product(range(2), range(4))}
    naive = naive_scores(evidence, lambda b, h, i: max(heads[b, q][i] for q in query_heads(evidence, h)))
    got = triattention(evidence, over=over, normalise=normalise, furthest=furthest)
    assert_heads_close(got.values_BHT, naive, ops=4)


def test_centres_of_a_file_stand_in_for_the_queries(tmp_path):
    rotary, path = Rotary(torch.tensor([0.3])), str(tmp_path / "centres.safetensors")
    evidence = random_evidence((0,), rotary=rotary, head_width=4)
    centre, length = (own[0] for own in centres_of(evidence))
    save_file({"centre.3": centre, "length.3": length}, path)
    blank = replace(evidence, queries_BQSD=torch.full_like(evidence.queries_BQSD[:, :, -1:], float("nan")))
    want = triattention(evidence).values_BHT
    assert torch.equal(triattention(blank, centres=path).values_BHT, want)
    family = SCORES["triattention"]
    assert family.needs_with({"centres": path}) == {"rotary"} and "queries" in family.needs_with({})
    # A rank of tensor parallelism has the last heads.
    part = replace(
        blank,
        first_head=1,
        queries_BQSD=blank.queries_BQSD[:, 2:],
        keys_BHTD=blank.keys_BHTD[:, 1:],
        values_BHTD=blank.values_BHTD[:, 1:],
        output_weight_QDE=blank.output_weight_QDE[2:],
    )
    assert torch.equal(triattention(part, centres=path).values_BHT, want[:, 1:])
    two = random_evidence((0, 3), rotary=rotary, head_width=4)
    alone = two.select_batch(slice(1, 2))
    in_two, by_itself = (triattention(own, centres=path).values_BHT for own in (two, alone))
    torch.testing.assert_close(in_two[1:], by_itself)
    refused("hold nothing for layer 4", triattention, replace(blank, layer_idx=4), centres=path)
    with pytest.raises(FileNotFoundError, match="query_centres, or leave centres out"):
        triattention(blank, centres="none.safetensors")
    refused("no rotary embedding", triattention, replace(evidence, rotary=None))
    refused("a sequence has none", triattention, random_evidence((0, 14), rotary=rotary))


def test_a_model_is_measured_and_its_cache_reads_the_file(tmp_path):
    model = tiny_model("llama")
    retain.attach(model)
    ids, _ = tiny_batch((0,), 60)
    documents = [Document(tuple(ids[0, :40].tolist()), ()), Document((), tuple(ids[0, 40:].tolist()))]
    found = measure_query_centres(model, documents)
    parts = [observe(model, own)[1] for own in (ids[:, :40], ids[:, 40:])]
    centres = [centres_of(own)[0][0] for own in parts]
    torch.testing.assert_close(found["centre.1"], (40 * centres[0] + 20 * centres[1]) / 60)
    path = str(tmp_path / "centres.safetensors")
    save_file(found, path)
    few = {"sinks": 1, "prefix_fraction": 0.0, "suffix_fraction": 0.0, "minimum": 0, "recent": 2}
    settings = {"keep_ratio": 0.3, "protection": few, "observed_settings": {"centres": path}}
    cache = retain.Cache(model, "triattention", regime="prefill+decode", every=4, **settings)
    model.generate(ids, past_key_values=cache, max_new_tokens=10)
    assert cache.entries_evicted > 0
    kept = retain.Cache(model, "triattention", **settings).prefill(ids).state.stores[1]
    (decided,) = decide_layers(
        retain.load_policy("triattention", [f"observed_settings.centres={path}", *PROTECTED]),
        [observe(model, ids)[1]],
        Budget(keep_ratio=0.3),
    )
    places = decided.keep_BHT.nonzero()[:, 2]
    assert kept.positions_C[kept.index_N()].tolist() == places.tolist()
    save_file({name: own for name, own in found.items() if not name.endswith(".1")}, path)
    refused("measure those of this model", retain.Cache, model, "triattention", **settings)
    changes = ["observed_settings.centres=3"]
    refused("path of a file, or null, got 3", retain.load_policy, "triattention", changes)
    refused("there are none: pass at least one", measure_query_centres, model, [])


def test_the_command_measures_the_reference_model(tmp_path, capsys):
    output = tmp_path / "made" / "centres.safetensors"
    typed = ["--model", "reference:0", "--documents", "2", "--context-tokens", "200", "--output", str(output)]
    assert main(typed) == 0 and "Centres of 4 layers" in capsys.readouterr().out
    assert load_file(output)["centre.0"].shape == (4, 64)
