"""`retain diagnose` on tiny models: definitions, the full cache's row, what policies keep, the record."""

import itertools
import json
import math
import re
from dataclasses import replace

import pytest
import torch

import retain
from retain.attention.ranking import rank_entries
from retain.eval.diagnose import (
    FULL,
    Document,
    Reading,
    coverage,
    cut,
    diagnose,
    divergence,
    documents_of,
    main,
    oracle_overlap,
    parser,
    summarise,
)
from retain.eval.run.answers import respond
from retain.eval.run.memory import positions_held
from retain.evidence import attention_probs
from retain.future import future_risk
from retain.hf.intercept.attach import attach
from retain.hf.intercept.observe import observe
from retain.hf.version_names import CACHE
from retain.reference import load_model, load_tokenizer
from retain.reference.corpus import stream
from tests.close import MODEL, assert_close
from tests.tiny import VOCAB, tiny_model

B, H, G, S, SEEN, T = 2, 2, 3, 4, 11, 8
STEPS = 10  # more than attention exists of at once
UNPROTECTED = "oracle," + ",".join(
    f"protection.{name}=0" for name in ("sinks", "recent", "prefix_fraction", "suffix_fraction", "minimum")
)


def drawn(seed, context, question):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB, (context + question,), generator=draw).tolist()
    return Document(tuple(ids[:context]), tuple(ids[context:]))


DOCUMENTS = [drawn(0, 90, 5), drawn(1, 70, 4)]


@pytest.mark.parametrize("sink", [False, True])
def test_coverage_is_its_formula_and_grows_with_the_kept_set(sink):
    logits = 3 * torch.randn(B, H * G, S, SEEN + 1, dtype=torch.float64)
    probs = logits.softmax(-1)[..., :SEEN] if sink else logits[..., :SEEN].softmax(-1)
    order = torch.rand(B, H, T).argsort(-1).argsort(-1)
    covered = torch.stack([coverage(probs, order < count) for count in range(T + 1)])
    naive = torch.zeros(B, H, S, dtype=torch.float64)
    for b, h, t in itertools.product(range(B), range(H), range(S)):
        paid = [max(float(probs[b, q, t, i]) for q in range(h * G, (h + 1) * G)) for i in range(T)]
        naive[b, h, t] = sum(p for i, p in enumerate(paid) if order[b, h, i] < 3) / sum(paid)
    assert_close(covered[3], naive, ops=4)
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


def test_divergence_is_its_formula():
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


POLICIES = ("snapkv", "snapkv,protection.sinks=2", "defensivekv", "learned", "random", UNPROTECTED)


@pytest.fixture(scope="module")
def read():
    """A model, and by document what was read behind its context, and readings with every kind of policy."""
    model = tiny_model("qwen3", seed=0)
    attach(model)
    gates = retain.new_gates(model, "linear", seed=0)
    found = []
    for document in DOCUMENTS:
        readings = diagnose(model, document, POLICIES, [0.7], steps=STEPS, gates=gates)
        ids = torch.tensor([[*document.context_ids, *document.question_ids]])
        (answer,) = respond(model, retain.Cache(model, None), ids, new_tokens=STEPS)
        found.append(((*document.question_ids, *answer[:-1]), answer, {one.policy: one for one in readings}))
    return model, gates, found


def test_the_full_cache_reads_as_it_must(read):
    rows = {row["policy"]: row for row in summarise([[*by_name.values()] for _, _, by_name in read[2]])}
    full = rows[FULL]
    for name in ("coverage", "coverage_worst", "oracle_overlap", "kept", "agreement"):
        assert full[name] == 1.0, name
    assert full["kl"] < 1e-9, "against the model without a cache of ours"
    assert rows["random"]["kl"] > 1e-3, "this model would not notice an eviction"
    assert rows[UNPROTECTED]["oracle_overlap"] == 1.0 and rows["random"]["oracle_overlap"] < 0.9


def test_each_policy_keeps_its_budget_as_a_cache_does(read):
    model, gates, found = read
    pairs = model.config.num_hidden_layers * model.config.num_key_value_heads
    for document, (_, _, by_name) in zip(DOCUMENTS, found, strict=True):
        seen = len(document.context_ids)
        kept = {name: int(one.keep_NT.sum()) for name, one in by_name.items()}
        assert kept.pop(FULL) == pairs * seen == by_name[FULL].keep_NT.numel()
        assert {*kept.values()} == {kept["snapkv"]}
        assert kept["snapkv"] == pytest.approx(0.7 * pairs * seen, abs=9)
        for name in ("snapkv", "learned"):
            how = {"gates": gates} if name == "learned" else {}
            cache = retain.Cache(model, name, keep_ratio=0.7, short="raise", **how)
            cache.prefill(torch.tensor([document.context_ids]))
            heads = positions_held(cache)
            for keep_T, positions in zip(by_name[name].keep_NT, heads, strict=True):
                assert keep_T.nonzero().flatten().tolist() == positions.tolist()


def layers_of(model, rows_N):
    return rows_N.unflatten(0, (model.config.num_hidden_layers, -1))


def test_steps_are_read_from_the_full_caches_queries(read):
    model, _, found = read
    tail, answer, by_name = found[0]
    assert len(by_name["random"].kl_S) == len(answer) == STEPS
    for place, layer in enumerate(observe(model, torch.tensor([[*DOCUMENTS[0].context_ids, *tail]]))):
        risk_1HT, _ = future_risk(layer, document_tokens=90, sources=("appendix",))
        kept = layers_of(model, by_name[UNPROTECTED].keep_NT)[place][None]
        assert torch.equal(kept, rank_entries(risk_1HT) < kept.sum(-1)[..., None])
        for name in ("snapkv", "random"):
            one = by_name[name]
            keep, got = (layers_of(model, x)[place] for x in (one.keep_NT, one.coverage_NS))
            for step in range(STEPS):
                row = layer.num_seen - STEPS + step
                probs = attention_probs(layer, row, row + 1)
                assert_close(got[:, step], coverage(probs, keep[None])[0, :, 0], ops=50)


def test_steps_are_compared_with_the_model_without_a_cache(read):
    model, _, found = read
    tail, answer, by_name = found[0]
    context, got = DOCUMENTS[0].context_ids, by_name["snapkv"]
    cache = retain.Cache(model, "snapkv", keep_ratio=0.7, short="raise").prefill(torch.tensor([context]))
    with torch.no_grad():
        full = model(input_ids=torch.tensor([[*context, *tail]]), use_cache=False).logits[0, -STEPS:]
        logits = model(input_ids=torch.tensor([tail]), use_cache=True, **{CACHE: cache}).logits[0, -STEPS:]
    p, q = (x.double().log_softmax(-1) for x in (full, logits))
    for measured, wanted in (
        (got.kl_S, (p.exp() * (p - q)).sum(-1)),
        (got.loss_S, -q[range(STEPS), list(answer)]),
        (by_name[FULL].loss_S, -p[range(STEPS), list(answer)]),
    ):
        assert_close(measured, wanted, dtype=torch.float32, ops=10 * MODEL)
    assert torch.equal(got.agree_S, logits.argmax(-1) == full.argmax(-1))
    assert got.kl_S.max() > 1e-4


def reading(coverage_NS, kl, loss, kept=3):
    return Reading(
        policy="it",
        keep_ratio=0.5,
        keep_NT=torch.arange(4).expand(2, 4) < kept,
        bytes_held=kept * 2**20,
        coverage_NS=torch.tensor(coverage_NS),
        overlap_N=torch.tensor([0.5, 1.0]),
        kl_S=torch.tensor(kl).double(),
        agree_S=torch.arange(len(kl)) < 1,
        loss_S=torch.tensor(loss).double(),
    )


def test_a_row_is_over_the_steps_of_all_documents():
    first = reading([[1.0, 0.2], [0.8, 0.4]], [0.1, 0.3], [1.0, 2.0])
    second = reading([[0.5], [0.49]], [0.8], [4.0], kept=1)
    worse = replace(second, policy="worse", loss_S=second.loss_S + 0.6)
    row, over = summarise([[first, first], [second, worse]])
    assert over["perplexity_ratio"] == pytest.approx(math.exp(0.6 / 3)), "over that of the first row"
    wanted = {
        **{"keep_ratio": 0.5, "coverage": sum([1.0, 0.2, 0.8, 0.4, 0.5, 0.49]) / 6, "coverage_worst": 0.2},
        **{"oracle_overlap": 0.75, "kl": 0.4, "agreement": 2 / 3, "perplexity": math.exp(7 / 3)},
        **{"perplexity_ratio": 1.0, "kept": 0.5, "mib_held": 2.0},
        "kl_se": 0.3,  # of the documents' means 0.2 and 0.8: their deviation of 0.6 / sqrt(2), over sqrt(2)
    }
    assert row.pop("policy") == "it" and row == pytest.approx(wanted)
    assert summarise([[first]])[0]["kl_se"] is None, "one document has no spread"


def test_a_given_continuation_is_scored_against_the_model():
    """Loss by three lines of torch, and no divergence of what holds everything."""
    ids, model = stream("eval")[:2000].tolist(), load_model()
    attach(model)
    for start, made in zip((0, 1000), documents := cut(ids, [1], 96, 12, 2), strict=True):
        whole = (*made.context_ids, *made.question_ids, *made.continuation_ids)
        assert whole == (1, *ids[start : start + 108])
        assert (len(made.context_ids), len(made.question_ids)) == (96, 1)
    readings = diagnose(model, documents[1], ("random",), (0.5, 1.0), steps=20)
    asked = [(FULL, 1.0), ("random", 0.5), ("random", 1.0)]
    assert [(one.policy, one.keep_ratio) for one in readings] == asked
    with torch.inference_mode():
        logits = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
    losses = [-float(logits[place - 1, whole[place]]) for place in range(97, 109)]
    for one in readings:
        everything = one.keep_ratio == 1.0
        assert (one.loss_S.tolist() == pytest.approx(losses, rel=1e-3, abs=1e-4)) == everything
        assert bool(one.keep_NT.all()) == everything and (float(one.kl_S.mean()) < 1e-8) == everything


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
    assert main(typed(local, output=tmp_path / "out.json", **more)) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["command"].startswith("retain diagnose --model ")
    rows = [(row["policy"], row["keep_ratio"]) for row in record["rows"]]
    assert rows == [(FULL, 1.0), *itertools.product(("snapkv", "random"), (0.6, 0.8))]


def test_the_oracle_covers_more_of_the_reference_models_tasks(tmp_path):
    options = "--model reference:0 --policies snapkv oracle --keep-ratio 0.4 --documents 2 --steps 4 "
    options += f"--task reference/multikey --context-tokens 200 --output {tmp_path / 'out.json'}"
    assert main(options.split()) == 0
    _, snapkv, oracle = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert oracle["coverage"] > snapkv["coverage"]


def test_documents_of_a_text(local):
    tokenizer = load_tokenizer()
    ids = tokenizer((local / "text.txt").read_text(), add_special_tokens=False)["input_ids"]
    given = parser().parse_args(typed(local, context_tokens=30, documents=3, steps=2))
    assert documents_of(given, None, tokenizer) == cut(ids, [tokenizer.bos_token_id], 30, 2, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--policies": "snapvk"}, r"unknown policy 'snapvk': did you mean 'snapkv'\?"),
        ({"--policies": "learned"}, "needs gates"),
        ({"--keep-ratio": "1.5"}, r"above 0 and at most 1, got \[1.5\]"),
        ({"--text": "absent.txt"}, "--text absent.txt cannot be read: .*No such file"),
        ({"--text": __file__, "--documents": "10000"}, "tokens cannot be cut into 10000 documents of 100 "),
        ({"--text": __file__, "--documents": "0"}, "tokens cannot be cut into 0 documents"),
        ({"--task": "niah/gird"}, "did you mean 'niah/grid'"),
        ({"--device": "foo"}, "device is 'foo', and must be 'cpu'"),
        ({"--steps": "0"}, "steps is at least 1, got 0"),
    ],
)
def test_wrong_input_is_said_and_nothing_is_written(tmp_path, capsys, changes, message):
    options = {"--model": "reference:0", "--policies": "snapkv", "--output": str(tmp_path / "out")}
    options |= {"--documents": "1", "--context-tokens": "100"} | changes
    options |= {} if "--text" in changes or "--task" in changes else {"--task": "reference/multikey"}
    assert main([part for pair in options.items() for part in pair]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
