"""The command on tiny models: the full cache's row, what is shown to whom, the record, and wrong input."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from retain.attention.chunked import truncate
from retain.budget.statement import Budget
from retain.eval.config import FULL
from retain.eval.diagnose import command, perplexity
from retain.eval.diagnose.command import (
    FILE,
    ORACLE,
    Setting,
    diagnose,
    main,
    policy_of,
    read_layers,
)
from retain.eval.diagnose.documents import Asked, cut, load, opening_of, reference_asked, text_asked
from retain.eval.diagnose.measures import coverage
from retain.eval.diagnose.record import record_of, table
from retain.eval.diagnose.teacher_forced import (
    end_tokens,
    read_context,
    read_plainly,
    respond,
    split,
    transcript,
)
from retain.eval.run.answers import Answer
from retain.eval.run.scoring import first_entries
from retain.evidence import attention_probs
from retain.future import future_risk
from retain.hf.intercept.attach import attach
from retain.hf.intercept.observe import observe
from retain.hf.model.gates import load_gates
from retain.policy import decide_layers, score_entries
from retain.reference import load_tokenizer
from retain.scores import Score
from tests.close import MODEL, assert_close
from tests.eval.stub import save_stub_gates, stub_model
from tests.refused import refused
from tests.tiny import VOCAB, tiny_model

UNPROTECTED = "oracle," + ",".join(
    f"protection.{name}=0" for name in ("sinks", "recent", "prefix_fraction", "suffix_fraction", "minimum")
)


def asked(name, seed, context=90, turns=(5, 3)):
    generator = torch.Generator().manual_seed(seed)
    draw = [tuple(torch.randint(2, VOCAB, (n,), generator=generator).tolist()) for n in (context, *turns)]
    return Asked(name, draw[0], tuple(draw[1:]))


DOCUMENTS = [asked("long", 0), asked("short", 1, context=70, turns=(4,))]


def told(model, document, regime, steps):
    """What is read of a document, and how the full cache goes on."""
    seen, turns = split(document, regime)
    attach(model)
    base = read_context(model, seen)
    assert base.evidence is None, "evidence is held where it is asked for"
    answers = respond(model, base, seen, turns, steps, total=steps)
    tail, asks, targets = transcript(turns, answers, steps)
    return SimpleNamespace(seen=seen, turns=turns, tail=tail, asks=asks, targets=targets)


@pytest.fixture(scope="module", params=["context_only", "query_aware"])
def read(request, tmp_path_factory):
    """Readings and record of two documents with every kind of policy, and the transcript of the first."""
    folder = tmp_path_factory.mktemp("gates")
    save_stub_gates(folder)
    model = stub_model(0)
    gates = load_gates(folder / "gates-seed0", model)
    policies = ("snapkv", "snapkv,protection.sinks=2", "defensivekv", "fused", "random", UNPROTECTED)
    setting = Setting(policies, keep_ratio=0.7, regime=request.param, steps=6)
    reads = list(diagnose(model, DOCUMENTS, setting, gates=gates))
    record = record_of(reads, {"keep_ratio": 0.7}, "the command")
    first = told(model, DOCUMENTS[0], request.param, 6)
    return SimpleNamespace(model=model, setting=setting, reads=reads, record=record, first=first)


def test_the_full_cache_reads_as_it_must(read):
    numbers = read.record["summary"][FULL]
    for name, value in numbers.items():
        if name.startswith("coverage"):
            assert value == (0.0 if "outlier" in name else 1.0), name
    assert numbers["oracle_overlap"] == numbers["kept_share"] == numbers["agreement"] == 1.0
    assert numbers["kl"] < 1e-9, "against the model without a cache of ours"
    assert numbers["perplexity_ratio"] == 1.0
    assert read.record["summary"]["random"]["kl"] > 1e-3, "this model would not notice an eviction"
    overlaps = {name: own["oracle_overlap"] for name, own in read.record["summary"].items()}
    assert overlaps[UNPROTECTED] == 1.0 and overlaps["random"] < 0.9


def test_what_is_kept_is_the_budget_in_every_policy(read):
    config = read.model.config
    heads = config.num_hidden_layers * config.num_key_value_heads
    for document, own in zip(DOCUMENTS, read.reads, strict=True):
        kept = {name: sum(int(x.keep_HT.sum()) for x in p.layers) for name, p in own.policies.items()}
        seen = len(split(document, read.setting.regime)[0])
        assert len(own.seen_ids) == seen and kept.pop(FULL) == heads * seen
        assert set(kept.values()) == {kept["snapkv"]}
        assert kept["snapkv"] == pytest.approx(0.7 * heads * seen, abs=9)
    maps = read.record["maps"]["random"]
    assert read.record["summary"]["random"]["kept_entries"] == pytest.approx(sum(map(sum, maps["kept"])))


def test_steps_are_read_from_the_full_caches_own_queries(read):
    own, first = read.reads[0], read.first
    assert own.steps == len(first.asks) == 6
    for place, layer in enumerate(observe(read.model, torch.tensor([[*first.seen, *first.tail]]))):
        for name in ("snapkv", "random"):
            got = own.policies[name].layers[place]
            for step, ask in enumerate(first.asks):
                row, keep = len(first.seen) + ask, got.keep_HT[None]
                probs = attention_probs(layer, row, row + 1)
                assert_close(got.coverage_HS[:, step], coverage(probs, keep)[0, :, 0], ops=50)


def test_chunks_of_steps_change_nothing(read, monkeypatch):
    teacher = observe(read.model, torch.tensor([[*DOCUMENTS[0].context_ids, *DOCUMENTS[0].turns[0]]]))
    keeps = {"one": [torch.rand(1, x.num_heads, 90) < 0.5 for x in teacher]}
    whole = read_layers(teacher, keeps, 90, (1, 2, 4))
    monkeypatch.setattr(command, "FLOATS_AT_ONCE", 1)
    for a, b in zip(whole["one"], read_layers(teacher, keeps, 90, (1, 2, 4))["one"], strict=True):
        assert a.coverage_HS.shape[-1] == 3
        assert_close(a.coverage_HS, b.coverage_HS, ops=50)


def test_logits_of_evicted_caches_are_those_of_a_model_that_never_held_the_entries(read):
    """One head a layer may differ, so every layer's mask goes into an eager forward as its own bias."""
    first, got = read.first, read.reads[0].policies["random"]
    eager, ids = tiny_model("qwen3", seed=0, attn="eager"), torch.tensor([[*first.seen, *first.tail]])
    total, heads = ids.shape[1], eager.config.num_attention_heads
    causal = torch.ones(total, total).tril().bool()
    for layer, own in zip(eager.model.layers, got.layers, strict=True):
        held = torch.nn.functional.pad(own.keep_HT, (0, len(first.tail)), value=True)
        held = held.repeat_interleave(heads // len(own.keep_HT), 0)[:, None]
        # Before the eviction nothing was missing.
        seen_by = causal & (held | (torch.arange(total)[:, None] < len(first.seen)))
        bias = torch.zeros(1, heads, total, total).masked_fill(~seen_by, torch.finfo(torch.float32).min)
        layer.self_attn.register_forward_pre_hook(
            lambda _m, args, kwargs, bias=bias: (args, {**kwargs, "attention_mask": bias}), with_kwargs=True
        )
    places = [len(first.seen) + ask for ask in first.asks]
    full, logits = (m(input_ids=ids, use_cache=False).logits[0, places] for m in (read.model, eager))
    p, q = (x.double().log_softmax(-1) for x in (full, logits))
    for found, wanted in (
        (got.kl_S, (p.exp() * (p - q)).sum(-1)),
        (got.loss_S, -q[range(6), list(first.targets)]),
        (read_plainly(read.model, ids[0].tolist(), len(first.tail))[list(first.asks)], full),
    ):
        assert_close(found, wanted, dtype=torch.float32, ops=10 * MODEL)
    assert torch.equal(got.agree_S, logits.argmax(-1) == full.argmax(-1))


def test_answers_are_the_likeliest_tokens_turn_by_turn():
    model, (context, turns) = stub_model(0), (DOCUMENTS[0].context_ids, DOCUMENTS[0].turns)
    attach(model)

    def spoken(turns, **more):
        return respond(model, read_context(model, context), context, turns, 5, **more)

    def likeliest(ids):
        for _ in range(5):
            ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
        return tuple(ids[-5:])

    with torch.no_grad():
        wanted = likeliest([*context, *turns[0]])
        assert spoken(turns[:1]) == [Answer(wanted)]
        model.generation_config.eos_token_id = [wanted[2]]
        assert end_tokens(model) == {wanted[2]}
        first, second = spoken(turns)
        assert first == Answer(wanted[: wanted.index(wanted[2])], wanted[2])
        # The second turn comes after the first answer and its end token, which was read too.
        later = likeliest([*context, *turns[0], *first.generated, *turns[1]])
        assert second.generated == later[: len(second.generated)] and (second.ended or second.tokens == later)
        assert len(spoken(turns, total=1)) == 1


def test_a_transcript_by_hand():
    document = Asked("one", (1, 2, 3), ((4, 5), (6,)))
    assert split(document, "context_only") == ((1, 2, 3), [(4, 5), (6,)])
    assert split(document, "query_aware") == ((1, 2, 3, 4), [(5,), (6,)])
    refused("document 'none' needs at least one turn", split, Asked("none", (1, 2), ()), "context_only")
    answers = [Answer((20, 21), 9), Answer((30,))]
    tail, asks, targets = transcript([(1, 2), (3,)], answers, steps=8)
    # 30 is predicted at 3; nothing is predicted at 30, which is not read.
    assert tail == (1, 2, 20, 21, 9, 3) and asks == (1, 2, 3, 5) and targets == (20, 21, 9, 30)
    assert transcript([(1, 2), (3,)], answers, steps=2) == ((1, 2, 20), (1, 2), (20, 21))


def test_the_record_says_what_was_read(read):
    reads, record = read.reads, read.record
    json.loads(json.dumps(record, allow_nan=False))
    names = [FULL, *read.setting.policies]
    summary, curves, maps = (record[part] for part in ("summary", "curves", "maps"))
    assert list(summary) == list(curves) == list(maps) == names
    assert [own["steps"] for own in record["documents"]] == [own.steps for own in reads]
    assert record["curves_documents"] == [sum(own.steps > t for own in reads) for t in range(6)]
    view = record["documents_view"]
    assert view["tokens"] == [str(i) for i in reads[0].seen_ids] and view["of"] == 3 * 2
    assert sum(view["kept"]["fused"]) == sum(int(x.keep_HT.sum()) for x in reads[0].policies["fused"].layers)
    assert FULL not in view["kept"]


def test_means_of_the_record_are_over_the_steps_of_all_documents(read):
    layers = [[own.policies["snapkv"].layers[n] for own in read.reads] for n in range(3)]
    cells = torch.cat([x.coverage_HS for layer in layers for x in layer], -1)
    one = torch.cat([x.coverage_HS for x in layers[1]], -1)
    at = torch.cat([x.coverage_HS[:, 2] for layer in layers for x in layer if x.coverage_HS.shape[-1] > 2])
    kl = torch.cat([own.policies["snapkv"].kl_S for own in read.reads])
    maps, curves, summary = (read.record[name]["snapkv"] for name in ("maps", "curves", "summary"))
    for found, wanted in (
        (summary["coverage_mean"], cells.mean()),
        (summary["coverage_worst"], cells.min()),
        (summary["kl"], kl.mean()),
        (maps["coverage"][1], one.mean(-1)),
        (maps["coverage_min"][1], one.amin(-1)),
        (curves["coverage_mean"][2], at.mean()),
        (curves["coverage_min"][2], at.min()),
    ):
        assert found == pytest.approx(wanted.tolist(), abs=1e-6)


def test_matrices_of_pairs(read):
    record, policies = read.record, list(read.setting.policies)
    likeness = torch.tensor(record["jaccard"]["mean"])
    assert record["jaccard"]["policies"] == policies
    assert torch.equal(likeness, likeness.T) and (likeness.diagonal() == 1).all()
    one, other = (policies.index(name) for name in ("snapkv", "random"))
    found = [
        int((a & b).sum()) / int((a | b).sum())
        for own in read.reads
        for x, y in zip(own.policies["snapkv"].layers, own.policies["random"].layers, strict=True)
        for a, b in zip(x.keep_HT, y.keep_HT, strict=True)
    ]
    assert float(likeness[one, other]) == pytest.approx(sum(found) / len(found))
    assert record["jaccard"]["identical"][one][other] == found.count(1.0) / len(found)


def decides(policy, evidence, scores, kept):
    made = decide_layers(policy, evidence, Budget(keep_ratio=0.7), scores=scores)
    for layer, one in zip(kept.layers, made, strict=True):
        assert torch.equal(layer.keep_HT, one.keep_BHT[0])


def test_the_oracle_is_the_true_risk_of_what_comes():
    model = stub_model(0)
    (own,) = diagnose(model, DOCUMENTS[1:], Setting((ORACLE,), 0.7, steps=3))
    short = told(model, DOCUMENTS[1], "context_only", 3)
    teacher = observe(model, torch.tensor([[*short.seen, *short.tail]]))
    risks = [future_risk(x, document_tokens=70, sources=("appendix",))[0] for x in teacher]
    scores = [Score(risk_BHT, "risk") for risk_BHT in risks]
    decides(policy_of(ORACLE), [truncate(x, 70) for x in teacher], scores, own.policies[ORACLE])


def test_scores_observe_what_the_regime_says_and_no_more(read):
    """By caches that never saw what came after."""
    for document, own in zip(DOCUMENTS, read.reads, strict=True):
        seen, _ = split(document, read.setting.regime)
        shown = document.context_ids + document.turns[0] * (read.setting.regime == "query_aware")
        policy, observed = policy_of("snapkv"), observe(read.model, torch.tensor([shown]))
        scores = [first_entries(score_entries(policy, layer), len(seen)) for layer in observed]
        decides(policy, [truncate(layer, len(seen)) for layer in observed], scores, own.policies["snapkv"])


def test_documents_of_unlike_steps_in_one_record():
    model = stub_model(0)
    (long,) = diagnose(model, DOCUMENTS[:1], Setting(("random",), 0.7, steps=12))
    (short,) = diagnose(model, DOCUMENTS[1:], Setting(("random",), 0.7, steps=2))
    record = record_of([long, short], {}, "")
    assert record["curves_documents"] == [2, 2, *[1] * 10]
    last = torch.cat([layer.coverage_HS[:, 11] for layer in long.policies["random"].layers])
    curves = record["curves"]["random"]
    assert curves["coverage_mean"][11] == pytest.approx(float(last.mean()), abs=1e-6)
    assert curves["kl"][11] == pytest.approx(float(long.policies["random"].kl_S[11]), abs=1e-9)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A model and a text in a folder, with the reference tokenizer."""
    folder = tmp_path_factory.mktemp("local")
    tokenizer = load_tokenizer()
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "text.txt").write_text("The cache holds a key and a value of every token that was read. " * 40)
    return folder


def typed(local, **more):
    """A command line on that model and text."""
    options = {"model": local / "model", "text": local / "text.txt", "policies": "snapkv", **more}
    words = [(f"--{name.replace('_', '-')}", *str(value).split()) for name, value in options.items()]
    return [word for pair in words for word in pair]


def test_the_command_on_a_text_and_a_local_model(local, tmp_path, capsys):
    more = {"policies": "snapkv random", "documents": 2, "context_tokens": 80, "steps": 4}
    arguments = typed(local, keep_ratio=0.6, out=tmp_path / "out", **more)
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    record = json.loads((tmp_path / "out" / FILE).read_text())
    assert table(record) in shown and "2 documents, 8 steps." in shown
    assert record["command"].startswith("python -m retain.eval.diagnose --model ")
    assert [own["entries"] for own in record["documents"]] == [80, 80]
    assert record["made"]["finished"] >= record["made"]["started"] and record["made"]["kv_heads"] == [2, 2]
    assert "".join(record["documents_view"]["tokens"]).count("cache holds") >= 1
    assert main(arguments) == 2
    assert "exists and is not overwritten" in capsys.readouterr().err


def test_the_command_on_the_reference_model(tmp_path):
    typed = "--model reference:0 --policies snapkv oracle --keep-ratio 0.4 --documents 1 --steps 5"
    assert main([*typed.split(), "--context-tokens", "200", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / FILE).read_text())
    oracle, snapkv = (record["summary"][name] for name in ("oracle", "snapkv"))
    assert oracle["coverage_mean"] > snapkv["coverage_mean"]
    assert record["documents"][0]["steps"] == 5 and record["made"]["query_heads"] == [4] * 4


def test_reference_documents_ask_and_do_not_answer():
    (first, second) = made = tuple(reference_asked(0, 2, 150))
    assert len(first.context_ids) == 150 and first != second and made == tuple(reference_asked(0, 2, 150))
    for text in map(load_tokenizer().decode, first.turns):
        assert text.startswith("<q>") and text.endswith("<a>") and text.count("<") == 2


def test_pieces_of_a_text(local, monkeypatch):
    """The same context, whichever command reads it."""
    tokenizer = load_tokenizer()
    ids = tokenizer((local / "text.txt").read_text(), add_special_tokens=False)["input_ids"]
    (first,), stride = opening_of(tokenizer), len(ids) // 3
    pieces = [(*one.context_ids, *one.turns[0]) for one in text_asked(local / "text.txt", tokenizer, 3, 30)]
    assert first == tokenizer.bos_token_id
    assert pieces == [(first, *ids[start : start + 30]) for start in (0, stride, 2 * stride)]

    def shown(model, read, *_, **__):
        raise ValueError([piece[:31] for piece in read] == pieces)

    monkeypatch.setattr(perplexity, "read_pieces", shown)
    arguments = typed(local, keep_ratio=0.5, context_tokens=30, scored_tokens=1, documents=3)
    refused("True", perplexity.run, perplexity.parser().parse_args(arguments), "")


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
)
def test_what_stands_before_a_text(tokenizer, opening, tmp_path):
    assert opening_of(tokenizer) == opening
    (tmp_path / "text.txt").write_text("abcdefgh" * 4)
    for one in text_asked(tmp_path / "text.txt", tokenizer, 2, 6):
        assert one.context_ids[: len(opening)] == opening and len(one.context_ids) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--policies": "snapvk"}, r"unknown policy 'snapvk': did you mean 'snapkv'\?"),
        ({"--policies": "full"}, "'full' is always measured: leave it out"),
        ({"--policies": "fused"}, r"fused takes a gate's score and there is none: pass gates \(--gates\)"),
        ({"--keep-ratio": "1.5"}, "above 0 and at most 1, got 1.5"),
        ({"--regime": "query-aware"}, "unknown regime 'query-aware': did you mean 'query_aware'"),
        ({"--model": "no/such"}, "documents for 'no/such' are cut from a text: pass --text"),
        ({"--text": "absent.txt"}, "--text absent.txt cannot be read: .*No such file"),
    ],
)
def test_wrong_input_is_said_and_nothing_is_written(tmp_path, capsys, changes, message):
    options = {"--model": "reference:0", "--policies": "snapkv", "--out": str(tmp_path / "out")} | changes
    assert main([part for pair in options.items() for part in pair]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


PIECE = {"context_tokens": 5, "behind": 1, "documents": 1}


def text_pieces(path, count, tokens):
    return next(text_asked(path, load_tokenizer(), count, tokens))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda _: Setting((), 0.5, steps=-1), "no policy is named.*steps is 1 or more, got -1"),
        (lambda _: record_of([], {}, ""), "nothing to diagnose"),
        (lambda own: text_pieces(own / "text.txt", 1, 10_000), "has 681 tokens, but .* need 10000"),
        (lambda own: load(str(own / "nothing")), "model='.*' cannot be loaded: .* or reference:0"),
        (lambda own: text_pieces(own / "picture", 1, 10), "cannot be read: .*UTF-8"),
        (lambda _: cut(range(20), (1, 2), **{**PIECE, "behind": 0}), "behind is 1 or more, got 0"),
        (lambda _: cut(range(20), (1, 2), **{**PIECE, "context_tokens": 2}), "no room behind 2 .* 3 or more"),
    ],
)
def test_wrong_input_from_python(local, call, message):
    (local / "picture").write_bytes(b"\xff\xfe\x00\xd8")
    refused(message, call, local)
