"""`retain diagnose` on tiny models: definitions, the full cache's row, what scores observe, the record."""

import itertools
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import retain
from retain.attention.chunked import truncate
from retain.budget.statement import Budget
from retain.eval import diagnose as module
from retain.eval.diagnose import (
    FILE,
    FULL,
    ORACLE,
    Document,
    Reading,
    coverage,
    coverage_of,
    diagnose,
    divergence,
    documents_of,
    generate,
    main,
    oracle_overlap,
    parser,
    policy_of,
    read_context,
    summarise,
    token_loss,
)
from retain.eval.run.scores import first_entries
from retain.eval.text_pieces import cut, opening_of
from retain.evidence import attention_probs
from retain.future import future_risk
from retain.hf.intercept.attach import attach
from retain.hf.intercept.observe import observe
from retain.policy import decide_layers, score_entries
from retain.reference import load_model, load_tokenizer
from retain.reference.corpus import stream
from retain.scores import Score
from tests.close import MODEL, assert_close
from tests.refused import refused
from tests.tiny import VOCAB, tiny_model

B, H, G, S, SEEN, T = 2, 2, 3, 4, 11, 8
UNPROTECTED = "oracle," + ",".join(
    f"protection.{name}=0" for name in ("sinks", "recent", "prefix_fraction", "suffix_fraction", "minimum")
)


def drawn(name, seed, context, question):
    ids = torch.randint(
        2, VOCAB, (context + question,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    return Document(name, tuple(ids[:context]), tuple(ids[context:]))


DOCUMENTS = [drawn("long", 0, 90, 5), drawn("short", 1, 70, 4)]


@pytest.fixture(params=["rows sum to one", "a sink takes some"])
def shown(request):
    """Attention of S queries, and a keep mask of the first T entries; float64."""
    logits = 3 * torch.randn(B, H * G, S, SEEN + 1, dtype=torch.float64)
    sink = request.param == "a sink takes some"
    probs = logits.softmax(-1)[..., :SEEN] if sink else logits[..., :SEEN].softmax(-1)
    return probs, torch.rand(B, H, T) < 0.4


def test_coverage_is_its_formula(shown):
    probs, keep = shown
    naive = torch.zeros(B, H, S, dtype=torch.float64)
    for b, h, t in itertools.product(range(B), range(H), range(S)):
        paid = [max(float(probs[b, q, t, i]) for q in range(h * G, (h + 1) * G)) for i in range(T)]
        naive[b, h, t] = sum(p for i, p in enumerate(paid) if keep[b, h, i]) / sum(paid)
    assert_close(coverage(probs, keep), naive, ops=4)


def test_coverage_is_monotone_in_the_kept_set(shown):
    probs, _ = shown
    order = torch.rand(B, H, T).argsort(-1).argsort(-1)
    covered = torch.stack([coverage(probs, order < count) for count in range(T + 1)])
    assert (covered.diff(dim=0) >= -1e-12).all()
    assert (covered[0] == 0).all() and (covered[-1] == 1).all()
    assert (coverage(probs.float(), order < T) == 1).all(), "exactly, in float32 too"
    unasked = torch.tensor([[[[0.0, 1.0]]]])
    assert coverage(unasked, torch.zeros(1, 1, 1, dtype=torch.bool)).item() == 1.0, "asked for nothing"


def test_oracle_overlap_by_hand():
    risk = torch.tensor([[[0.1, 0.9, 0.9, 0.3, float("-inf")]]])
    for places, wanted in (([1], 0.0), ([2], 1.0), ([1, 2], 1.0), ([0, 1], 0.5), ([0, 1, 2], 2 / 3), ([], 1)):
        keep = torch.zeros(1, 1, 5, dtype=torch.bool)
        keep[0, 0, places] = True
        assert oracle_overlap(keep, risk).item() == pytest.approx(wanted), places


def test_divergence_and_losses_are_their_formulas():
    logits, other = (3 * torch.randn(5, 13) for _ in range(2))
    p, q = (x.double().softmax(-1) for x in (logits, other))
    naive = [
        sum(float(a) * math.log(a / b) for a, b in zip(*row, strict=True)) for row in zip(p, q, strict=True)
    ]
    assert_close(divergence(logits, other), torch.tensor(naive).double(), dtype=torch.float32)
    assert (divergence(logits, logits) == 0).all() and (divergence(logits, logits + 5.0) < 1e-12).all()
    never = torch.tensor([[0.0, float("-inf")]])
    assert divergence(never, torch.zeros(1, 2)).item() == pytest.approx(math.log(2))
    assert divergence(torch.zeros(1, 2), never).item() == math.inf
    losses = token_loss(torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, -1.0]]), torch.tensor([2, 0]))
    by_hand = [math.log(sum(math.exp(x - 2) for x in (1, 3, 2))), math.log(2 + math.exp(-1))]
    assert losses.tolist() == pytest.approx(by_hand)


@pytest.fixture(scope="module", params=["unknown", "known"])
def read(request):
    """Readings of two documents with every kind of policy, and what was read of each document."""
    model = tiny_model("qwen3", seed=0)
    policies = ("snapkv", "snapkv,protection.sinks=2", "defensivekv", "learned", "random", UNPROTECTED)
    gates = retain.new_gates(model, "linear", seed=0)
    reads = list(diagnose(model, DOCUMENTS, policies, [0.7], question=request.param, steps=6, gates=gates))
    told = []
    for document in DOCUMENTS:
        known = request.param == "known"
        seen = document.context_ids + document.question_ids[:-1] * known
        behind = document.question_ids[-1:] if known else document.question_ids
        answer = generate(model, read_context(model, seen), behind, 6)
        observed = len(seen) + known
        told.append(
            SimpleNamespace(seen=seen, tail=(*behind, *answer[:-1]), answer=answer, observed=observed)
        )
    own = [{one.policy: one for one in readings} for readings in reads]
    return SimpleNamespace(model=model, reads=reads, own=own, rows=summarise(reads), told=told)


def test_the_full_cache_reads_as_it_must(read):
    (full, *_), rows = read.rows, {row["policy"]: row for row in read.rows}
    assert full["policy"] == FULL and full["coverage_outliers"] == 0.0
    for name in ("coverage_mean", "coverage_worst_step", "coverage_worst", "oracle_overlap", "kept_share"):
        assert full[name] == 1.0, name
    assert full["agreement"] == 1.0 and full["kl"] < 1e-9, "against the model without a cache of ours"
    assert full["perplexity_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert rows["random"]["kl"] > 1e-3, "this model would not notice an eviction"
    assert rows[UNPROTECTED]["oracle_overlap"] == 1.0 and rows["random"]["oracle_overlap"] < 0.9


def test_what_is_kept_is_the_budget_in_every_policy(read):
    pairs = read.model.config.num_hidden_layers * read.model.config.num_key_value_heads
    for told, own in zip(read.told, read.own, strict=True):
        kept = {name: int(one.keep_NT.sum()) for name, one in own.items()}
        assert kept.pop(FULL) == pairs * len(told.seen) == own[FULL].keep_NT.numel()
        assert {*kept.values()} == {kept["snapkv"]}
        assert kept["snapkv"] == pytest.approx(0.7 * pairs * len(told.seen), abs=9)


def layers_of(model, rows_N):
    return rows_N.unflatten(0, (model.config.num_hidden_layers, -1))


def test_steps_are_read_from_the_full_caches_queries(read):
    told, own = read.told[0], read.own[0]
    assert len(own["random"].kl_S) == len(told.answer) == 6
    for place, layer in enumerate(observe(read.model, torch.tensor([[*told.seen, *told.tail]]))):
        for name in ("snapkv", "random"):
            keep, got = (layers_of(read.model, x)[place] for x in (own[name].keep_NT, own[name].coverage_NS))
            for step in range(6):
                row = layer.num_seen - 6 + step
                probs = attention_probs(layer, row, row + 1)
                assert_close(got[:, step], coverage(probs, keep[None])[0, :, 0], ops=50)


def test_chunks_of_steps_change_nothing(monkeypatch):
    teacher = observe(
        tiny_model("qwen3"), torch.tensor([[*DOCUMENTS[0].context_ids, *DOCUMENTS[0].question_ids]])
    )
    keeps = [[torch.rand(1, layer.num_heads, 90) < 0.5 for layer in teacher]]
    (whole,) = coverage_of(teacher, keeps, 3)
    monkeypatch.setattr(module, "FLOATS_AT_ONCE", 1)
    assert whole.shape[-1] == 3
    assert_close(coverage_of(teacher, keeps, 3)[0], whole, ops=50)


def test_logits_of_evicted_caches_are_those_of_a_model_that_never_held_the_entries(read):
    """One head a layer may differ, so every layer's mask goes into an eager forward as its bias."""
    told, got = read.told[0], read.own[0]["random"]
    eager, ids = tiny_model("qwen3", seed=0, attn="eager"), torch.tensor([[*told.seen, *told.tail]])
    total, heads = ids.shape[1], eager.config.num_attention_heads
    causal = torch.ones(total, total).tril().bool()
    for layer, keep_HT in zip(eager.model.layers, layers_of(eager, got.keep_NT), strict=True):
        held = torch.nn.functional.pad(keep_HT, (0, len(told.tail)), value=True)
        held = held.repeat_interleave(heads // len(keep_HT), 0)[:, None]
        # Before the eviction nothing was missing.
        seen_by = causal & (held | (torch.arange(total)[:, None] < len(told.seen)))
        bias = torch.zeros(1, heads, total, total).masked_fill(~seen_by, torch.finfo(torch.float32).min)
        layer.self_attn.register_forward_pre_hook(
            lambda _m, args, kwargs, bias=bias: (args, {**kwargs, "attention_mask": bias}), with_kwargs=True
        )
    full, logits = (m(input_ids=ids, use_cache=False).logits[0, -6:] for m in (read.model, eager))
    p, q = (x.double().log_softmax(-1) for x in (full, logits))
    for found, wanted in (
        (got.kl_S, (p.exp() * (p - q)).sum(-1)),
        (got.loss_S, -q[range(6), list(told.answer)]),
        (got.loss_full_S, -p[range(6), list(told.answer)]),
    ):
        assert_close(found, wanted, dtype=torch.float32, ops=10 * MODEL)
    assert torch.equal(got.agree_S, logits.argmax(-1) == full.argmax(-1))


def decides(model, policy, evidence, scores, kept):
    made = decide_layers(policy, evidence, Budget(keep_ratio=0.7), scores=scores)
    for layer, one in zip(layers_of(model, kept.keep_NT), made, strict=True):
        assert torch.equal(layer, one.keep_BHT[0])


def test_scores_observe_what_the_question_says_and_no_more(read):
    """By caches that never saw what came after; the oracle by the true risk of what came."""
    for told, own in zip(read.told, read.own, strict=True):
        whole, seen = (*told.seen, *told.tail), len(told.seen)
        policy, observed = policy_of("snapkv"), observe(read.model, torch.tensor([whole[: told.observed]]))
        scores = [first_entries(score_entries(policy, layer), seen) for layer in observed]
        evidence = [truncate(layer, seen) for layer in observed]
        decides(read.model, policy, evidence, scores, own["snapkv"])
        teacher = observe(read.model, torch.tensor([whole]))
        risks = [future_risk(layer, document_tokens=seen, sources=("appendix",))[0] for layer in teacher]
        scores = [Score(risk_BHT, "risk") for risk_BHT in risks]
        decides(read.model, policy_of(UNPROTECTED), evidence, scores, own[UNPROTECTED])


def test_answers_are_the_likeliest_tokens_up_to_an_end():
    model, (context, question) = (
        tiny_model("qwen3", seed=0),
        (DOCUMENTS[0].context_ids, DOCUMENTS[0].question_ids),
    )
    attach(model)
    with torch.no_grad():
        ids = [*context, *question]
        for _ in range(5):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        wanted = tuple(ids[-5:])
        assert generate(model, read_context(model, context), question, 5) == wanted
        model.generation_config.eos_token_id = [wanted[2]]
        assert (
            generate(model, read_context(model, context), question, 5)
            == wanted[: wanted.index(wanted[2]) + 1]
        )


def reading(policy, coverage_NS, kl, loss, full, kept=3):
    steps = len(kl)
    return Reading(
        policy,
        0.5,
        torch.tensor(coverage_NS),
        torch.tensor([0.5, 1.0]),
        torch.arange(4).expand(2, 4) < kept,
        torch.tensor(kl).double(),
        torch.arange(steps) < 1,
        torch.tensor(loss).double(),
        torch.tensor(full).double(),
    )


def test_a_row_is_over_the_steps_of_all_documents():
    first = reading("it", [[1.0, 0.2], [0.8, 0.4]], [0.1, 0.3], [1.0, 2.0], [1.0, 1.0])
    second = reading("it", [[0.5], [0.49]], [0.8], [4.0], [2.5], kept=1)
    (row,) = summarise([[first], [second]])
    cells = [1.0, 0.2, 0.8, 0.4, 0.5, 0.49]
    assert row["coverage_mean"] == pytest.approx(sum(cells) / 6)
    assert row["coverage_worst_step"] == pytest.approx(0.3) and row["coverage_worst"] == pytest.approx(0.2)
    assert row["coverage_outliers"] == pytest.approx(3 / 6), "a half is covered"
    assert row["kl"] == pytest.approx(0.4) and row["agreement"] == pytest.approx(2 / 3)
    assert row["perplexity"] == pytest.approx(math.exp(7 / 3))
    assert row["perplexity_ratio"] == pytest.approx(math.exp(2.5 / 3))
    assert (row["kept_entries"], row["kept_share"], row["oracle_overlap"]) == (4.0, 0.5, 0.75)
    assert row["intervals"] == {"kl": None, "agreement": None, "perplexity_ratio": None}, "unlike steps"


def test_an_interval_is_paired():
    """A policy that is worse by the same everywhere has no spread, however unlike the documents are."""
    own = [[reading("it", [[1.0], [1.0]], [0.2], [n + 0.1], [n])] for n in range(6)]
    (row,) = summarise(own)
    assert row["intervals"]["perplexity_ratio"] == pytest.approx([math.exp(0.1)] * 2)


def test_a_given_continuation_is_scored_against_the_model():
    """Loss by three lines of torch, and no divergence of what holds everything."""
    ids, model = stream("eval")[:2000].tolist(), load_model(0)
    pieces = cut(ids, [1], context_tokens=96, behind=13, documents=3)
    assert [list(piece) for piece in pieces] == [[1, *ids[start : start + 108]] for start in (0, 666, 1332)]
    documents = [Document("piece", one[:96], one[96:97], one[97:]) for one in pieces]
    reads = list(diagnose(model, documents, ("snapkv", "random"), (0.5, 1.0), steps=20))
    for piece, readings in zip(pieces, reads, strict=True):
        assert [(one.policy, one.keep_ratio) for one in readings] == [
            (FULL, 1.0),
            *itertools.product(("snapkv", "random"), (0.5, 1.0)),
        ]
        with torch.inference_mode():
            logits = model(torch.tensor([piece])).logits[0].double().log_softmax(-1)
        losses = [-float(logits[place - 1, piece[place]]) for place in range(97, 109)]
        for one in readings:
            assert one.loss_full_S.tolist() == pytest.approx(losses, rel=1e-3, abs=1e-4)
            whole = one.keep_ratio == 1.0
            assert bool(one.keep_NT.all()) == whole and (float(one.kl_S.mean()) < 1e-8) == whole
    rows = summarise(reads)
    for row, own in zip(rows, zip(*reads, strict=True), strict=True):
        differences = [float((one.loss_S - one.loss_full_S).mean()) for one in own]
        assert row["perplexity_ratio"] == pytest.approx(math.exp(np.mean(differences)))
        low, high = row["intervals"]["perplexity_ratio"]
        assert low <= row["perplexity_ratio"] <= high


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A model and a text in a folder, with the reference tokenizer."""
    folder = tmp_path_factory.mktemp("local")
    tokenizer = load_tokenizer()
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "text.txt").write_text("The cache holds a key and a value of every token that was read. " * 40)
    return folder


def typed(folder, **more):
    """A command line on that model and text."""
    options = {"model": folder / "model", "text": folder / "text.txt", "policies": "snapkv random", **more}
    words = [(f"--{name.replace('_', '-')}", *str(value).split()) for name, value in options.items()]
    return [word for pair in words for word in pair]


def test_the_command_on_a_text_and_a_local_model(local, tmp_path, capsys):
    more = {"keep_ratio": "0.6 0.8", "documents": 2, "context_tokens": 80, "steps": 4}
    arguments = typed(local, out=tmp_path / "out", **more)
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    record = json.loads((tmp_path / "out" / FILE).read_text())
    assert "2 documents, 8 steps." in shown and len(shown.splitlines()) == 6 + 3
    assert record["command"].startswith("retain diagnose --model ") and record["made"]["text"] == "text.txt"
    assert [(row["policy"], row["keep_ratio"]) for row in record["rows"]][1:3] == [
        ("snapkv", 0.6),
        ("snapkv", 0.8),
    ]
    assert [own["entries"] for own in record["documents"]] == [80, 80]
    assert main(arguments) == 2
    assert "exists and is not overwritten" in capsys.readouterr().err


def test_the_oracle_covers_more_of_the_reference_models_tasks(tmp_path):
    options = "--model reference:0 --policies snapkv oracle --keep-ratio 0.4 --documents 2 "
    options += "--task reference/multikey"
    arguments = [
        *options.split(),
        "--context-tokens",
        "200",
        "--continuation",
        "given",
        "--out",
        str(tmp_path),
    ]
    assert main(arguments) == 0
    record = json.loads((tmp_path / FILE).read_text())
    _, snapkv, oracle = record["rows"]
    assert oracle["coverage_mean"] > snapkv["coverage_mean"]
    assert record["documents"][0]["name"] == "reference/multikey, item 0"


def test_documents_of_a_text(local):
    """The same contexts, whether the text goes on or the model does."""
    tokenizer = load_tokenizer()
    ids = tokenizer((local / "text.txt").read_text(), add_special_tokens=False)["input_ids"]
    (first,), more = opening_of(tokenizer), {"context_tokens": 30, "documents": 3, "steps": 2}
    assert first == tokenizer.bos_token_id
    for continuation, behind in (("generated", 1), ("given", 3)):
        given = parser().parse_args(typed(local, continuation=continuation, **more))
        pieces = cut(ids, (first,), context_tokens=30, behind=behind, documents=3)
        for piece, document in zip(pieces, documents_of(given, None, tokenizer), strict=True):
            assert (document.context_ids, document.question_ids) == (piece[:30], piece[30:31])
            assert document.continuation_ids == (piece[31:] or None)


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
def test_what_stands_before_a_text(tokenizer, opening):
    assert opening_of(tokenizer) == opening


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--policies": "snapvk"}, r"unknown policy 'snapvk': did you mean 'snapkv'\?"),
        ({"--policies": "full"}, "at least one, each once, and not 'full'"),
        (
            {"--policies": "learned"},
            r"learned takes a gate's score and there is none: pass gates \(--gates\)",
        ),
        ({"--policies": "kivi"}, "'kivi' has a precision, .* equal numbers of entries: take eval/compare.py"),
        ({"--keep-ratio": "1.5"}, r"above 0 and at most 1, got \[1.5\]"),
        ({"--model": "no/such"}, "'no/such' comes with no text: pass --text FILE or --task NAME"),
        ({"--text": "absent.txt"}, "--text absent.txt cannot be read: .*No such file"),
        ({"--task": "niah/gird"}, "did you mean 'niah/grid'"),
        ({"--device": "foo"}, "device is 'foo', and must be 'cpu'"),
        ({"--dtype": "flaot32"}, r"dtype is 'flaot32' \(did you mean 'float32'\?\)"),
        ({"--steps": "0"}, "steps is at least 1, got 0"),
        ({"--context-tokens": "1"}, "context_tokens is 2 or more .*, got 1"),
        ({"--context-tokens": "10000000"}, "but 8 pieces of 10000000 need"),
    ],
)
def test_wrong_input_is_said_and_nothing_is_written(tmp_path, capsys, changes, message):
    options = {"--model": "reference:0", "--policies": "snapkv", "--out": str(tmp_path / "out")} | changes
    assert main([part for pair in options.items() for part in pair]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_wrong_input_from_python():
    model = tiny_model("qwen3")
    empty = Document("none", (1, 2), ())
    refused("'none' needs a context and a question", lambda: [*diagnose(model, [empty], ["snapkv"], [0.5])])
    refused("did you mean 'known'", lambda: [*diagnose(model, [], ["snapkv"], [0.5], question="knwon")])
    assert policy_of(ORACLE).name == ORACLE
