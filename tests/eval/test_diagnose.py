"""`retain diagnose` on tiny models: definitions, every number of a row, the record."""

import itertools
import json
import math
import re

import pytest
import torch

import retain
from retain.eval.diagnose import (
    FULL,
    coverage,
    diagnose,
    divergence,
    documents_of,
    main,
    oracle_overlap,
    parser,
    policies_of,
    summarise,
)
from retain.eval.run.memory import positions_held
from retain.eval.run.scores import oracle
from retain.eval.tasks.encode import Encoded
from retain.evidence import attention_probs
from retain.hf.intercept.attach import attach
from retain.hf.intercept.observe import observe
from retain.hf.version_names import CACHE
from retain.reference import load_tokenizer
from tests.close import assert_close
from tests.tiny import VOCAB, tiny_model

B, H, G, S, SEEN, T = 2, 2, 3, 4, 11, 8
STEPS = 10  # more than attention exists of at once


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


POLICIES = ("snapkv", "snapkv,protection.sinks=2", "learned", "random")


@pytest.fixture(scope="module")
def read():
    """A model, gates, a document, and its rows with every kind of policy."""
    model = tiny_model("qwen3", seed=0)
    attach(model)
    gates = retain.new_gates(model, "linear", seed=0)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(2, VOCAB, (90 + 5 + STEPS,), generator=draw).tolist()
    document = Encoded(tuple(ids[:90]), tuple(ids[90:95]), tuple(ids[95:]), ())
    rows = diagnose(model, document, policies_of(POLICIES, [0.7]), [0.7], gates=gates)
    return model, gates, document, {row["policy"]: row for row in rows}


def test_the_full_cache_reads_as_it_must(read):
    rows = read[3]
    for name in ("coverage", "coverage_worst", "oracle_overlap", "kept", "agreement", "keep_ratio"):
        assert rows[FULL][name] == 1.0, name
    assert rows[FULL]["kl"] < 1e-9, "against the model without a cache of ours"
    assert rows["random"]["kl"] > 1e-3, "this model would not notice an eviction"
    assert rows["random"]["oracle_overlap"] < 0.9
    kept = {row["kept"] for name, row in rows.items() if name != FULL}
    assert len(kept) == 1 and kept.pop() == pytest.approx(0.7, abs=0.02)
    held = {round(row["mib_held"] / row["kept"], 9) for row in rows.values()}
    assert held == {round(rows[FULL]["mib_held"], 9)}


def layers_of(model, rows_N):
    return rows_N.unflatten(0, (model.config.num_hidden_layers, -1))


@pytest.mark.parametrize("name", ["snapkv", "learned", "snapkv,protection.sinks=2"])
def test_a_row_is_that_of_a_cache_by_hand(read, name):
    """Coverage and likeness from loops over the full model's attention, divergence from its logits."""
    model, gates, document, rows = read
    context, tail = document.context_ids, (*document.question_ids, *document.answer_ids[:-1])
    evidence = observe(model, torch.tensor([[*context, *tail]]))
    risks = [score.values_BHT for score in oracle([evidence], 90)]
    preset, _, change = name.partition(",")
    how = {"gates": gates} if name == "learned" else {"protection": {"sinks": 2}} if change else {}
    cache = retain.Cache(model, preset, keep_ratio=0.7, short="raise", **how)
    cache.prefill(torch.tensor([context]))
    keep_NT = torch.zeros(6, 90, dtype=torch.bool)
    for keep_T, positions in zip(keep_NT, positions_held(cache), strict=True):
        keep_T[positions] = True
    covered, overlap = [], []
    for layer, risk, keep in zip(evidence, risks, layers_of(model, keep_NT), strict=True):
        overlap.append(oracle_overlap(keep[None], risk))
        for row in range(layer.num_seen - STEPS, layer.num_seen):
            covered.append(coverage(attention_probs(layer, row, row + 1), keep[None]).flatten())
    covered = torch.cat(covered).double()
    with torch.no_grad():
        whole = torch.tensor([[*context, *tail]])
        full = model(input_ids=whole, use_cache=False).logits[0, -STEPS:]
        logits = model(input_ids=torch.tensor([tail]), use_cache=True, **{CACHE: cache}).logits[0, -STEPS:]
    p, q = (x.double().log_softmax(-1) for x in (full, logits))
    said = range(STEPS), list(document.answer_ids)
    wanted = {
        **{"keep_ratio": 0.7, "kept": float(keep_NT.double().mean())},
        **{"coverage": float(covered.mean()), "coverage_worst": float(covered.min())},
        **{"oracle_overlap": float(torch.cat(overlap).mean()), "loss": -float(q[said].mean())},
        "kl": float((p.exp() * (p - q)).sum(-1).mean()),
        "agreement": float((logits.argmax(-1) == full.argmax(-1)).double().mean()),
    }
    found = {key: value for key, value in rows[name].items() if key not in ("policy", "mib_held")}
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert rows[FULL]["loss"] == pytest.approx(-float(p[said].mean()), rel=1e-5)


def test_a_row_is_over_all_documents():
    first = {
        "policy": "it",
        "keep_ratio": 0.5,
        "coverage": 0.6,
        "coverage_worst": 0.2,
        "kl": 0.2,
        "loss": 1.5,
    }
    second = first | {"coverage": 0.5, "coverage_worst": 0.49, "kl": 0.8, "loss": 4.0}
    row, over = summarise([[first, first], [second, second | {"loss": 4.6}]])
    assert over["perplexity_ratio"] == pytest.approx(math.exp(0.6 / 2)), "over that of the first row"
    wanted = {
        **{"keep_ratio": 0.5, "coverage": 0.55, "coverage_worst": 0.2, "kl": 0.5},
        **{"perplexity": math.exp(2.75), "perplexity_ratio": 1.0},
        "kl_se": 0.3,  # a deviation of 0.6 / sqrt(2), over sqrt(2)
    }
    assert row.pop("policy") == "it" and row == pytest.approx(wanted)
    assert summarise([[first]])[0]["kl_se"] is None, "one document has no spread"


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


def test_the_command_on_a_task(tmp_path):
    options = "--model reference:0 --policies snapkv --keep-ratio 0.4 --documents 2 --steps 4 "
    options += f"--task reference/multikey --context-tokens 200 --output {tmp_path / 'out.json'}"
    assert main(options.split()) == 0
    full, snapkv = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert full["coverage"] > snapkv["coverage"] and full["perplexity"] < 3, "it knows the answer"


def test_documents_of_a_text_do_not_overlap(local):
    tokenizer = load_tokenizer()
    ids = tokenizer((local / "text.txt").read_text(), add_special_tokens=False)["input_ids"]
    given = parser().parse_args(typed(local, context_tokens=30, documents=3, steps=2))
    for number, made in enumerate(documents_of(given, None, tokenizer)):
        start = number * (len(ids) // 3)
        whole = (*made.context_ids, *made.question_ids, *made.answer_ids)
        assert whole == (tokenizer.bos_token_id, *ids[start : start + 32])
        assert (len(made.context_ids), len(made.question_ids)) == (30, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--policies": "learned"}, "needs gates"),
        ({"--keep-ratio": "1.5"}, r"above 0 and at most 1, got \[1.5\]"),
        ({"--text": "absent.txt"}, "--text absent.txt cannot be read: .*No such file"),
        ({"--text": __file__, "--documents": "10000"}, "tokens cannot be cut into 10000 documents of 100 "),
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
