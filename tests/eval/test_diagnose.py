"""The command on tiny models: the full cache's row, what is shown to whom, the record, and wrong input."""

import json
from dataclasses import replace

import pytest
import torch

from retain.attention.chunked import truncate
from retain.budget.statement import Budget
from retain.eval.diagnose import command, perplexity
from retain.eval.diagnose.command import FILE, ORACLE, Setting, diagnose, main, policy_of, read_layers
from retain.eval.diagnose.documents import cut, load, opening_of, reference_asked, text_asked
from retain.eval.diagnose.measures import coverage, head_perturbation
from retain.eval.diagnose.record import FULL, record_of, table
from retain.eval.diagnose.teacher_forced import (
    Answer,
    Asked,
    end_tokens,
    read_plainly,
    respond,
    split,
    transcript,
)
from retain.eval.run.scoring import first_entries
from retain.evidence import attention_probs
from retain.future import future_risk
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from retain.hf.intercept.observe import observe
from retain.hf.model.gates import load_gates
from retain.policy import decide_layers, score_entries
from retain.reference import load_tokenizer
from retain.scores import Score
from tests.close import MODEL, assert_close
from tests.eval.stub import save_stub_gates, stub_model
from tests.tiny import VOCAB, tiny_model

UNPROTECTED = "oracle," + ",".join(
    f"protection.{name}=0" for name in ("sinks", "recent", "prefix_fraction", "suffix_fraction", "minimum")
)


def asked(name, seed, context=90, turns=(5, 3)):
    generator = torch.Generator().manual_seed(seed)
    draw = [tuple(torch.randint(2, VOCAB, (n,), generator=generator).tolist()) for n in (context, *turns)]
    return Asked(name, draw[0], tuple(draw[1:]))


DOCUMENTS = [asked("long", 0), asked("short", 1, context=70, turns=(4,))]


@pytest.fixture(scope="module", params=["context_only", "query_aware"])
def read(request, tmp_path_factory):
    """Readings and record of two documents, with every kind of policy."""
    folder = tmp_path_factory.mktemp("gates")
    save_stub_gates(folder)
    model = stub_model(0)
    gates = load_gates(folder / "gates-seed0", model)
    policies = ("snapkv", "snapkv,protection.sinks=2", "defensivekv", "fused", "random", UNPROTECTED)
    setting = Setting(policies, keep_ratio=0.7, regime=request.param, steps=6)
    reads = list(diagnose(model, DOCUMENTS, setting, gates=gates))
    return model, setting, reads, record_of(reads, {"keep_ratio": 0.7}, "the command")


def test_the_full_cache_reads_as_it_must(read):
    numbers = read[3]["summary"][FULL]
    for name, value in numbers.items():
        if name.startswith(("coverage", "value_coverage")):
            assert value == (0.0 if "outlier" in name else 1.0), name
        if name.startswith(("output_loss", "perturbation")):
            assert value == 0.0, name
    assert numbers["oracle_overlap"] == numbers["kept_share"] == numbers["agreement"] == 1.0
    assert max(numbers["kl"], numbers["kl_reverse"]) < 1e-9, "against the model without a cache of ours"
    assert numbers["perplexity_ratio"] == 1.0
    assert read[3]["summary"]["random"]["kl"] > 1e-3, "this model would not notice an eviction"


def test_what_is_kept_is_the_budget_in_every_policy(read):
    model, setting, reads, record = read
    for number, own in enumerate(reads):
        kept = {name: sum(int(x.keep_HT.sum()) for x in p.layers) for name, p in own.policies.items()}
        heads = model.config.num_hidden_layers * model.config.num_key_value_heads
        context = len(DOCUMENTS[number].context_ids)
        seen = context + (len(DOCUMENTS[number].turns[0]) - 1 if setting.regime == "query_aware" else 0)
        assert len(own.seen_ids) == seen and kept.pop(FULL) == heads * seen
        assert set(kept.values()) == {kept["snapkv"]} and kept["snapkv"] == pytest.approx(
            0.7 * heads * seen, abs=9
        )
    for name in ("snapkv", "random"):
        summary, maps = record["summary"][name], record["maps"][name]
        assert summary["kept_entries"] == pytest.approx(sum(map(sum, maps["kept"])))


def test_an_unprotected_oracle_keeps_what_the_oracle_would(read):
    overlaps = {name: own["oracle_overlap"] for name, own in read[3]["summary"].items()}
    assert overlaps[UNPROTECTED] == 1.0 and overlaps["random"] < 0.9


def test_steps_are_read_from_the_full_caches_own_queries(read):
    """Coverage and perturbation, from one forward over the transcript and one step at a time."""
    model, setting, reads, _ = read
    document, own = DOCUMENTS[0], reads[0]
    seen, turns = split(document, setting.regime)
    answers = respond(model, _whole(model, seen), turns, 6, total=6)
    tail, asks, _ = transcript(turns, answers, 6)
    assert own.steps == len(asks) == 6
    for place, layer in enumerate(observe(model, torch.tensor([[*seen, *tail]]))):
        for name in ("snapkv", "random"):
            got = own.policies[name].layers[place]
            for step, ask in enumerate(asks):
                row = len(seen) + ask
                probs = attention_probs(layer, row, row + 1)
                assert_close(got.coverage_HS[:, step], coverage(probs, got.keep_HT[None])[0, :, 0], ops=50)
                moved = head_perturbation(
                    probs, layer.values_BHTD, layer.output_weight_QDE, got.keep_HT[None]
                )
                assert_close(got.perturbation_QS[:, step], moved[0, :, 0], ops=50)
                assert (got.perturbation_QS <= got.bound_QS * 1.0001).all()
                assert (got.loss_l1_S <= got.loss_bound_S * 1.0001).all()


def _whole(model, ids):
    attach(model)
    return Cache(model, policy=None).prefill(torch.tensor([ids]))


def test_chunks_of_steps_change_nothing(read, monkeypatch):
    model, _, reads, _ = read
    ids = torch.tensor([[*DOCUMENTS[0].context_ids, *DOCUMENTS[0].turns[0]]])
    teacher = observe(model, ids)
    keeps = {"one": [torch.rand(1, x.num_heads, 90) < 0.5 for x in teacher]}
    whole = read_layers(teacher, keeps, 90, (1, 2, 4))
    monkeypatch.setattr(command, "FLOATS_AT_ONCE", 1)
    for a, b in zip(whole["one"], read_layers(teacher, keeps, 90, (1, 2, 4))["one"], strict=True):
        assert a.coverage_HS.shape[-1] == 3
        for name in ("coverage_HS", "value_coverage_HS", "perturbation_QS", "bound_QS", "loss_l1_S"):
            assert_close(getattr(a, name), getattr(b, name), ops=50)


def test_logits_of_evicted_caches_are_those_of_a_model_that_never_held_the_entries(read):
    """One head a layer may differ, so every layer's mask goes into an eager forward as its own bias."""
    model, setting, reads, _ = read
    document = DOCUMENTS[0]
    seen, turns = split(document, setting.regime)
    answers = respond(model, _whole(model, seen), turns, 6, total=6)
    tail, asks, targets = transcript(turns, answers, 6)
    keeps = [layer.keep_HT for layer in reads[0].policies["random"].layers]
    eager = tiny_model("qwen3", seed=0, attn="eager")
    ids = torch.tensor([[*seen, *tail]])
    total, heads = ids.shape[1], eager.config.num_attention_heads
    causal = torch.ones(total, total).tril().bool()
    for layer, keep_HT in zip(eager.model.layers, keeps, strict=True):
        held = torch.nn.functional.pad(keep_HT, (0, len(tail)), value=True)
        held = held.repeat_interleave(heads // len(keep_HT), 0)[:, None]
        # Before the eviction nothing was missing.
        seen_by = causal & (held | (torch.arange(total)[:, None] < len(seen)))
        bias = torch.zeros(1, heads, total, total).masked_fill(~seen_by, torch.finfo(torch.float32).min)
        own = layer.self_attn
        own.register_forward_pre_hook(
            lambda _m, args, kwargs, bias=bias: (args, {**kwargs, "attention_mask": bias}), with_kwargs=True
        )
    logits = eager(input_ids=ids, use_cache=False).logits[0, [len(seen) + ask for ask in asks]]
    full = model(input_ids=ids, use_cache=False).logits[0, [len(seen) + ask for ask in asks]]
    p, q = (x.double().log_softmax(-1) for x in (full, logits))
    got = reads[0].policies["random"]
    assert_close(got.kl_S, (p.exp() * (p - q)).sum(-1), dtype=torch.float32, ops=10 * MODEL)
    assert_close(got.kl_reverse_S, (q.exp() * (q - p)).sum(-1), dtype=torch.float32, ops=10 * MODEL)
    assert_close(got.loss_S, -q[range(6), list(targets)], dtype=torch.float32, ops=10 * MODEL)
    assert torch.equal(got.agree_S, logits.argmax(-1) == full.argmax(-1))
    assert_close(
        read_plainly(model, (*seen, *tail), len(tail))[list(asks)], full, dtype=torch.float32, ops=MODEL
    )


def test_answers_are_those_of_generate():
    model = stub_model(0)
    document = DOCUMENTS[0]
    ids = torch.tensor([[*document.context_ids, *document.turns[0]]])
    with torch.no_grad():
        (answer,) = respond(model, _whole(model, document.context_ids), document.turns[:1], 5)
        wanted = model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :].tolist()
        assert answer == Answer(tuple(wanted), None)
        model.generation_config.eos_token_id = [wanted[2]]
        assert end_tokens(model) == {wanted[2]}
        (ended,) = respond(model, _whole(model, document.context_ids), document.turns[:1], 5)
        assert ended == Answer(tuple(wanted[: wanted.index(wanted[2])]), wanted[2])
        # The second turn comes after the first answer and its end token, which was read too.
        both = respond(model, _whole(model, document.context_ids), document.turns, 5)
        ids = torch.tensor(
            [[*document.context_ids, *document.turns[0], *ended.tokens, wanted[2], *document.turns[1]]]
        )
        later = model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :].tolist()
        spoken = [*both[1].tokens, *([] if both[1].end is None else [both[1].end])]
        assert len(both) == 2 and spoken == later
        assert len(respond(model, _whole(model, document.context_ids), document.turns, 5, total=1)) == 1


def test_a_transcript_by_hand():
    answers = [Answer((20, 21), 9), Answer((30,), None)]
    tail, asks, targets = transcript([(1, 2), (3,)], answers, steps=8)
    # 30 is predicted at 3; nothing is predicted at 30, which is not read.
    assert tail == (1, 2, 20, 21, 9, 3) and asks == (1, 2, 3, 5) and targets == (20, 21, 9, 30)
    assert transcript([(1, 2), (3,)], answers, steps=2) == ((1, 2, 20), (1, 2), (20, 21))


def test_what_was_seen_before_the_eviction():
    document = Asked("one", (1, 2, 3), ((4, 5), (6,)))
    assert split(document, "context_only") == ((1, 2, 3), [(4, 5), (6,)])
    assert split(document, "query_aware") == ((1, 2, 3, 4), [(5,), (6,)])
    with pytest.raises(ValueError, match="document 'none' needs at least one turn"):
        split(Asked("none", (1, 2), ()), "context_only")


def test_the_record_says_everything_once_more_in_rows(read):
    model, setting, reads, record = read
    json.loads(json.dumps(record, allow_nan=False))
    names = [FULL, *setting.policies]
    assert list(record["summary"]) == list(record["curves"]) == list(record["maps"]) == names
    rows = {
        (r["policy"], r["metric"], r["layer"], r["head"], r["step"]): r["value"] for r in record["records"]
    }
    assert len(rows) == len(record["records"])
    assert rows["snapkv", "coverage_mean", None, None, None] == record["summary"]["snapkv"]["coverage_mean"]
    assert rows["snapkv", "kl", None, None, 3] == record["curves"]["snapkv"]["kl"][3]
    assert rows["snapkv", "kept", 1, 0, None] == record["maps"]["snapkv"]["kept"][1][0]
    assert rows["snapkv", "output_loss_l1", 2, None, None] == record["maps"]["snapkv"]["output_loss_l1"][2]
    assert [own["steps"] for own in record["documents"]] == [own.steps for own in reads]
    assert record["curves_documents"] == [sum(own.steps > t for own in reads) for t in range(6)]
    view = record["documents_view"]
    assert view["tokens"] == [str(i) for i in reads[0].seen_ids] and view["of"] == 3 * 2
    assert sum(view["kept"]["fused"]) == sum(int(x.keep_HT.sum()) for x in reads[0].policies["fused"].layers)
    assert FULL not in view["kept"]


def test_means_of_the_record_are_over_the_steps_of_all_documents(read):
    _, _, reads, record = read
    layers = [[own.policies["snapkv"].layers[n] for own in reads] for n in range(3)]
    cells = torch.cat([x.coverage_HS for layer in layers for x in layer], -1)
    maps, curves, summary = (record[name]["snapkv"] for name in ("maps", "curves", "summary"))
    assert summary["coverage_mean"] == pytest.approx(float(cells.mean()), abs=1e-6)
    assert summary["coverage_worst"] == pytest.approx(float(cells.min()), abs=1e-6)
    one = torch.cat([x.coverage_HS for x in layers[1]], -1)
    assert maps["coverage"][1] == pytest.approx(one.mean(-1).tolist(), abs=1e-6)
    assert maps["coverage_min"][1] == pytest.approx(one.amin(-1).tolist(), abs=1e-6)
    at = [x.coverage_HS[:, 2] for layer in layers for x in layer if x.coverage_HS.shape[-1] > 2]
    assert curves["coverage_mean"][2] == pytest.approx(float(torch.cat(at).mean()), abs=1e-6)
    assert curves["coverage_min"][2] == pytest.approx(float(torch.cat(at).min()), abs=1e-6)
    first = torch.cat([x.perturbation_QS[:, 0] for layer in layers for x in layer])
    assert summary["perturbation_first"] == pytest.approx(float(first.mean()), rel=1e-5)


def test_matrices_of_pairs(read):
    _, setting, reads, record = read
    likeness = torch.tensor(record["jaccard"]["mean"])
    assert record["jaccard"]["policies"] == list(setting.policies)
    assert torch.equal(likeness, likeness.T) and (likeness.diagonal() == 1).all()
    one, other = (list(setting.policies).index(name) for name in ("snapkv", "random"))
    found = [
        len({*a} & {*b}) / len({*a} | {*b})
        for own in reads
        for x, y in zip(own.policies["snapkv"].layers, own.policies["random"].layers, strict=True)
        for a, b in zip(map(_places, x.keep_HT), map(_places, y.keep_HT), strict=True)
    ]
    assert record["jaccard"]["mean"][one][other] == pytest.approx(sum(found) / len(found))
    assert record["jaccard"]["identical"][one][other] == found.count(1.0) / len(found)
    below = torch.tensor(record["head_wise"]["all_steps"])
    assert (below.diagonal() == 0).all() and (below + below.T <= 1).all() and (below > 0).any()


def _places(keep_T):
    return keep_T.nonzero()[:, 0].tolist()


def test_two_names_of_one_policy_are_seen_to_be_one():
    model = stub_model(0)
    setting = Setting(("recency", "recency,protection.sinks=4"), keep_ratio=0.7, steps=2)
    record = record_of(diagnose(model, DOCUMENTS[1:], setting), {}, "")
    assert record["jaccard"]["identical"] == [[1.0, 1.0], [1.0, 1.0]]
    one, other = (record["summary"][name] for name in setting.policies)
    assert one == other


def test_a_budget_of_everything_is_the_full_cache():
    model = stub_model(0)
    record = record_of(diagnose(model, DOCUMENTS[1:], Setting(("snapkv",), 1.0, steps=3)), {}, "")
    own, full = record["summary"]["snapkv"], record["summary"][FULL]
    assert own == full


def test_the_oracle_is_the_true_risk_of_what_comes():
    """Scores of the one definition of future risk, through the gate's pipeline."""
    model = stub_model(0)
    (own,) = diagnose(model, DOCUMENTS[1:], Setting((ORACLE,), 0.7, steps=3))
    seen, turns = split(DOCUMENTS[1], "context_only")
    tail, _, _ = transcript(turns, respond(model, _whole(model, seen), turns, 3), 3)
    teacher = observe(model, torch.tensor([[*seen, *tail]]))
    risks = [future_risk(x, document_tokens=70, sources=("appendix",))[0] for x in teacher]
    evidence = [truncate(x, 70) for x in teacher]
    scores = [Score(risk_BHT, "risk") for risk_BHT in risks]
    made = decide_layers(policy_of(ORACLE), evidence, Budget(keep_ratio=0.7), scores=scores)
    for layer, one in zip(own.policies[ORACLE].layers, made, strict=True):
        assert torch.equal(layer.keep_HT, one.keep_BHT[0])


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A model and a text in a folder, with the reference tokenizer."""
    folder = tmp_path_factory.mktemp("local")
    tokenizer = load_tokenizer()
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "text.txt").write_text("The cache holds a key and a value of every token that was read. " * 40)
    return folder


def test_the_command_on_a_text_and_a_local_model(local, tmp_path, capsys):
    arguments = ["--model", str(local / "model"), "--text", str(local / "text.txt"), "--keep-ratio", "0.6"]
    arguments += [
        "--policies",
        "snapkv",
        "random",
        "--documents",
        "2",
        "--context-tokens",
        "80",
        "--steps",
        "4",
    ]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    record = json.loads((tmp_path / "out" / FILE).read_text())
    assert table(record) in shown and "2 documents, 8 steps." in shown
    assert record["command"].startswith("python -m retain.eval.diagnose --model ")
    assert [own["entries"] for own in record["documents"]] == [80, 80]
    assert record["made"]["finished"] >= record["made"]["started"] and record["made"]["kv_heads"] == [2, 2]
    assert "".join(record["documents_view"]["tokens"]).count("cache holds") >= 1
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    assert "exists and is not overwritten" in capsys.readouterr().err


def test_the_command_on_the_reference_model(tmp_path, capsys):
    arguments = ["--model", "reference:0", "--policies", "snapkv", "oracle", "--keep-ratio", "0.4"]
    arguments += ["--documents", "1", "--context-tokens", "200", "--steps", "5", "--out", str(tmp_path)]
    assert main(arguments) == 0
    record = json.loads((tmp_path / FILE).read_text())
    summary = record["summary"]
    assert summary["oracle"]["coverage_mean"] > summary["snapkv"]["coverage_mean"]
    assert summary["oracle"]["output_loss_l1"] < summary["snapkv"]["output_loss_l1"]
    assert record["documents"][0]["steps"] == 5 and record["made"]["query_heads"] == [4] * 4


def test_reference_documents_ask_and_do_not_answer():
    tokenizer = load_tokenizer()
    (first, second) = reference_asked(0, 2, 150)
    assert len(first.context_ids) == 150 and first != second
    assert (first, second) == tuple(reference_asked(0, 2, 150))
    for turn in first.turns:
        text = tokenizer.decode(turn)
        assert text.startswith("<q>") and text.endswith("<a>") and text.count("<") == 2


def test_pieces_of_a_text(local):
    tokenizer = load_tokenizer()
    ids = tokenizer((local / "text.txt").read_text(), add_special_tokens=False)["input_ids"]
    before = tuple(opening_of(tokenizer))
    pieces = list(text_asked(local / "text.txt", tokenizer, 3, 30))
    shown = [[*one.context_ids[len(before) :], *one.turns[0]] for one in pieces]
    stride = len(ids) // 3
    assert shown == [ids[start : start + 31 - len(before)] for start in (0, stride, 2 * stride)]
    assert before == (tokenizer.bos_token_id,)
    assert all(one.context_ids[: len(before)] == before for one in pieces)
    assert all((len(one.context_ids), len(one.turns[0])) == (30, 1) for one in pieces)
    with pytest.raises(ValueError, match="pieces of 30 need 30000: pass a longer text, or ask for fewer"):
        list(text_asked(local / "text.txt", tokenizer, 1000, 30))


class _Spelled:
    """A tokenizer of letters."""

    def __init__(self, before=(), behind=(), first=None):
        self.before, self.behind, self.bos_token_id = before, behind, first

    def __call__(self, text, add_special_tokens=True):
        plain = [100 + ord(letter) for letter in text]
        return {"input_ids": [*self.before, *plain, *self.behind] if add_special_tokens else plain}


@pytest.mark.parametrize(
    ("tokenizer", "opening"),
    [
        (_Spelled(before=(1, 2), first=1), (1, 2)),
        (_Spelled(before=(1,), behind=(3,), first=1), (1,)),
        (_Spelled(first=1), (1,)),  # knows a first token, and leaves it out
        (_Spelled(behind=(3,), first=0), (0,)),
        (_Spelled(), ()),
    ],
    ids=["two", "and_an_end", "left_out", "left_out_number_0", "none"],
)
def test_what_stands_before_a_text(tokenizer, opening, tmp_path):
    assert opening_of(tokenizer) == opening
    (tmp_path / "text.txt").write_text("abcdefgh" * 4)
    for one in text_asked(tmp_path / "text.txt", tokenizer, 2, 6):
        assert one.context_ids[: len(opening)] == opening and len(one.context_ids) == 6


def test_perplexity_and_diagnosis_cut_the_same_way(local, monkeypatch):
    """The same context, whichever command reads it."""
    tokenizer, shown = load_tokenizer(), []

    def stop(model, pieces, *_, **__):
        shown.extend(pieces)
        raise ValueError("seen enough")

    monkeypatch.setattr(perplexity, "read_pieces", stop)
    arguments = ["--model", str(local / "model"), "--text", str(local / "text.txt"), "--policies", "snapkv"]
    arguments += ["--keep-ratio", "0.5", "--context-tokens", "30", "--scored-tokens", "1", "--documents", "3"]
    with pytest.raises(ValueError, match="seen enough"):
        perplexity.run(perplexity.parser().parse_args(arguments), "")
    asked_for = list(text_asked(local / "text.txt", tokenizer, 3, 30))
    assert [piece[:31] for piece in shown] == [(*one.context_ids, *one.turns[0]) for one in asked_for]


def test_wrong_pieces():
    how = {"context_tokens": 5, "behind": 1, "documents": 1}
    for changed, said in (
        ({"behind": 0}, "behind is 1 or more, got 0"),
        ({"documents": 0}, "documents is 1 or more, got 0"),
        ({"context_tokens": 2}, "leaves no room behind 2 special tokens: ask for 3 or more"),
    ):
        with pytest.raises(ValueError, match=said):
            cut(range(20), (1, 2), **{**how, **changed})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--policies": "snapvk"}, r"unknown policy 'snapvk': did you mean 'snapkv'\?"),
        ({"--policies": "full"}, "'full' is always measured: leave it out"),
        ({"--policies": "fused"}, "fused takes a gate's score: pass --gates"),
        ({"--keep-ratio": "1.5"}, "above 0 and at most 1, got 1.5"),
        ({"--steps": "0"}, "steps is 1 or more, got 0"),
        ({"--documents": "0"}, "--documents is 1 or more"),
        ({"--regime": "query-aware"}, "unknown regime 'query-aware': did you mean 'query_aware'"),
        ({"--aggregate": "median"}, "unknown aggregate over query heads 'median'"),
        ({"--model": "reference:7"}, "unknown model 'reference:7', known: reference:0"),
        ({"--model": "no/such"}, "documents for 'no/such' are cut from a text: pass --text"),
        ({"--text": "absent.txt"}, "text file 'absent.txt' does not exist"),
    ],
)
def test_wrong_input_is_said_and_nothing_is_written(tmp_path, capsys, changes, message):
    options = {"--model": "reference:0", "--policies": "snapkv", "--out": str(tmp_path / "out")} | changes
    assert main([part for pair in options.items() for part in pair]) == 2
    assert _matches(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def _matches(message, text):
    import re

    return re.search(message, text)


def test_wrong_input_from_python(local, tmp_path):
    with pytest.raises(ValueError, match="no policy is named.*steps is 1 or more, got -1"):
        Setting((), 0.5, steps=-1)
    with pytest.raises(ValueError, match="policies repeat: random random"):
        Setting(("random", "random"), 0.5)
    with pytest.raises(ValueError, match="gate takes a gate's score and there is none: pass gates"):
        next(diagnose(stub_model(0), DOCUMENTS, Setting(("gate",), 0.5)))
    with pytest.raises(ValueError, match="nothing to diagnose"):
        record_of([], {}, "")
    with pytest.raises(ValueError, match="the text has 681 tokens, but 1 pieces of 10000 need 10000"):
        next(text_asked(local / "text.txt", load_tokenizer(), 1, 10_000))
    with pytest.raises(ValueError, match="model='.*' cannot be loaded: .* or reference:0"):
        load(str(tmp_path / "nothing"))
    (tmp_path / "picture.txt").write_bytes(b"\xff\xfe\x00\xd8")
    with pytest.raises(ValueError, match="is no UTF-8 text"):
        next(text_asked(tmp_path / "picture.txt", load_tokenizer(), 1, 10))


def test_scores_observe_what_the_regime_says_and_no_more(read):
    """By caches that never saw what came after."""
    model, setting, reads, _ = read
    for document, own in zip(DOCUMENTS, reads, strict=True):
        seen, _ = split(document, setting.regime)
        shown = document.context_ids
        if setting.regime == "query_aware":
            shown += document.turns[0]
        policy, observed = policy_of("snapkv"), observe(model, torch.tensor([shown]))
        scores = [first_entries(score_entries(policy, layer), len(seen)) for layer in observed]
        evidence = [truncate(layer, len(seen)) for layer in observed]
        made = decide_layers(policy, evidence, Budget(keep_ratio=0.7), scores=scores)
        for layer, one in zip(own.policies["snapkv"].layers, made, strict=True):
            assert torch.equal(layer.keep_HT, one.keep_BHT[0])


def test_a_policy_answers_from_what_it_kept_and_its_own_words(read):
    model, setting, reads, _ = read
    seen, turns = split(DOCUMENTS[0], setting.regime)
    asked_turns = turns[: len(reads[0].policies[FULL].outputs)]
    full = reads[0].policies[FULL].outputs
    for name in ("snapkv", "random"):
        own = reads[0].policies[name]
        attach(model)
        cache = Cache(model, policy=None).prefill(torch.tensor([seen]), evict=False)
        cache.evict_with([layer.keep_HT[None] for layer in own.layers])
        with torch.no_grad():
            answers = respond(model, cache, asked_turns, 6)
        assert own.outputs == tuple(answer.tokens for answer in answers)
    assert reads[0].policies["random"].outputs != full, "this model would not notice an eviction"


def test_documents_of_unlike_steps_and_answers_in_one_record():
    model = stub_model(0)
    (long,) = diagnose(model, DOCUMENTS[:1], Setting(("random",), 0.7, steps=12))
    (short,) = diagnose(model, DOCUMENTS[1:], Setting(("random",), 0.7, steps=2))
    looping = replace(long.policies["random"], outputs=((7,) * 13, (1, 2)), ended=1)
    long = replace(long, policies={**long.policies, "random": looping})
    record = record_of([long, short], {}, "")
    assert record["curves_documents"] == [2, 2, *[1] * 10]
    own = record["summary"]["random"]
    answers = 2 + len(short.policies["random"].outputs)
    assert own["repetition"] == 0.9 and own["hit_cap"] == pytest.approx(1 - 1 / answers)
    assert short.policies["random"].ended == 0, "this model has no end token"
    last = torch.cat([layer.coverage_HS[:, 11] for layer in looping.layers])
    assert record["curves"]["random"]["coverage_mean"][11] == pytest.approx(float(last.mean()), abs=1e-6)
