"""TriAttention against its published series of complex numbers; and statistics of a file as its code
publishes it."""

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
from tests.naive import assert_heads_close, masked, random_evidence
from tests.refused import refused
from tests.tiny import tiny_batch, tiny_model

PROTECTED = [
    *("protection.sinks=1", "protection.prefix_fraction=0", "protection.suffix_fraction=0"),
    *("protection.minimum=0", "protection.recent=2"),
]


@pytest.mark.parametrize(("scaling", "furthest"), [(1.0, 9), (1.3, 64), (1.0, 1)])
def test_the_series_of_the_centre_and_the_length_of_what_scatters(scaling, furthest):
    """Six dimensions, of which RoPE turns four."""
    rotary = Rotary(torch.tensor([0.7, 0.1]), scaling)
    evidence = random_evidence((0, 3), head_width=6, rotary=rotary, dtype=torch.float64)
    (G, F), at_BT = (evidence.group, 2), evidence.positions_BT
    plain_q = rotary.unrotate(evidence.queries_BQSD, at_BT)
    plain_k = rotary.unrotate(evidence.keys_BHTD, at_BT).repeat_interleave(G, 1)
    queries = [plain_q[b, :, evidence.valid_BT[b]] for b in range(2)]
    centre = torch.stack([one.mean(1) for one in queries])
    length = torch.stack([torch.complex(one[..., :F], one[..., F : 2 * F]).abs().mean(1) for one in queries])
    c, k = (torch.complex(x[..., :F], x[..., F : 2 * F]) for x in (centre, plain_k))
    distances = torch.tensor([2**n for n in range(furthest.bit_length())])
    ahead = at_BT[:, -1:, None] + 1 + distances - at_BT[..., None]
    phase = rotary.inverse_frequencies_F.double() * ahead[:, None, ..., None]
    phase = phase + c.angle()[:, :, None, None] - k.angle()[:, :, :, None]
    series = (c.abs()[:, :, None, None] * k.abs()[:, :, :, None] * phase.cos()).sum(-1).mean(-1)
    scattered = ((length - c.abs())[:, :, None] * k.abs()).sum(-1)
    values = (series + scattered) * scaling**2
    values = values + (centre[:, :, None, 2 * F :] * plain_k[..., 2 * F :]).sum(-1)
    for b in range(2):
        valid = values[b][:, evidence.valid_BT[b]]
        values[b] = (values[b] - valid.mean(-1, keepdim=True)) / valid.std(-1, correction=0, keepdim=True)
    naive = masked(values.unflatten(1, (-1, G)).amax(2), evidence)
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
    score = SCORES["triattention"]
    assert score.under({"centres": path}).needs == ("rotary",)  # no cache holds queries for it
    assert "queries" in score.under({}).needs
    blank = replace(evidence, queries_BQSD=torch.full_like(evidence.queries_BQSD[:, :, -1:], float("nan")))
    want = triattention(evidence).values_BHT
    assert torch.equal(triattention(blank, centres=path).values_BHT, want)
    two = random_evidence((0, 3), rotary=rotary, head_width=4)
    alone = two.select_batch(slice(1, 2))
    in_two, by_itself = (triattention(shown, centres=path).values_BHT for shown in (two, alone))
    torch.testing.assert_close(in_two[1:], by_itself)
    refused("hold None for layer 4", triattention, replace(blank, layer_idx=4), centres=path)
    half = replace(blank, rotary=Rotary(torch.tensor([0.3])))
    refused(r"hold \(4, 3, 2\) for layer 3, wanted \(4, 3, 1\)", triattention, half, centres=path)
    with pytest.raises(FileNotFoundError, match=r"scripts/calibrate.py .*, or leave centres out"):
        triattention(blank, centres="none.pt")
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
    refused("hold None for layer 1.*for this model", retain.Cache, model, "triattention", **settings)
