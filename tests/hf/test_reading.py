"""Selection when reading: every answer is masked dense attention over what each query chose, the choice is
the method's by plain loops, and what is counted is what was gathered."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import retain
from retain.budget.statement import Budget
from retain.head_tables import format_table
from retain.hf.cache.cache import Cache
from retain.hf.model.decoder import rotary_of
from retain.hf.version_names import CACHE
from retain.policy import decide_layers, load_policy
from retain.presets import Policy
from retain.reading import Reading, reader
from retain.vllm.settings import problems_of_policy
from tests.close import MODEL, assert_close
from tests.hf.masked import evicting, full_cache, masked, positions_of
from tests.refused import refused
from tests.tiny import SINGLE, attached, tiny_batch, tiny_model

PADS, TOKENS, NEW = (0, 3, 11), 45, 7
# Full attention alone; sinks, a soft cap, and layers that are left alone, which take padding for tokens.
FAMILIES = {
    "llama": PADS,
    "qwen3": PADS,
    "gemma3": PADS,
    "gpt_oss": (0, 0),
    "gemma2": (0, 0),
    "qwen3_next": (0, 0),
}
METHODS = {
    "quest": {"by": "quest", "page": 4},
    "quest_mean": {"by": "quest", "page": 3, "group": "mean", "sinks": 2, "recent": 4},
    "mpcache": {"by": "mpcache", "page": 4, "coarse_page": 8, "sinks": 1},
    "fasa": {"by": "fasa", "page": 1, "pairs": 0.3},
    "random": {"by": "random", "page": 4, "sinks": 1},
    "recency": {"by": "recency", "page": 1, "sinks": 3},
}
RATIO = 0.6


@pytest.fixture
def table(tmp_path):
    """Writes a table of random agreements of a model's pairs."""

    def written(model) -> str:
        specs = retain.hf.model.decoder.describe(model)
        width = len(rotary_of(model).inverse_frequencies_F)
        draw = torch.Generator().manual_seed(5)
        rows = torch.rand(len(specs), specs[0].num_kv_heads * width, generator=draw)
        path = tmp_path / "dominant_pairs.tsv"
        path.write_text(format_table(rows.tolist(), [spec.layer_idx for spec in specs]))
        return str(path)

    return written


def opened(model, name, table=None, **how) -> Cache:
    own = METHODS[name] | ({"dominant_pairs": table(model)} if name == "fasa" else {})
    stated = {"keep_ratio": RATIO} if not {"tokens_per_head", "bytes"} & how.keys() else {}
    policy = Policy(name, reading=Reading(**own | how.pop("reading", {})))
    return Cache(model, policy, regime="select", **stated, **how)


class Spy:
    """What every query chose: by layer, in order, query heads, keys of each row, entries chosen."""

    def __init__(self, monkeypatch):
        self.seen: list[tuple[int, Tensor, list[Tensor], list[int], list[list[int]], Tensor]] = []
        own = reader.Reader.choose

        def choose(this, layer_idx, store, queries_BQD, seen_B, pages_B):
            before = this.read.get(layer_idx, 0)
            made = own(this, layer_idx, store, queries_BQD, seen_B, pages_B)
            rows, first = range(store.num_rows), store.offsets_R1
            keys = [store.keys_CD[int(first[r]) :][: seen_B[r // store.num_heads]].clone() for r in rows]
            places = [(made.index_RN[r, : int(made.counts_R[r])] - first[r]).tolist() for r in rows]
            counted = this.read[layer_idx] - before
            self.seen.append((layer_idx, queries_BQD.clone(), keys, list(seen_B), places, counted))
            return made

        monkeypatch.setattr(reader.Reader, "choose", choose)


@torch.no_grad()
def decoded(model, cache, ids, mask, *, split=TOKENS, each=1, chunk=None):
    """Reads `split` tokens, then decodes the others, `each` a forward; logits of those."""
    cache.prefill(ids[:, :split], mask[:, :split], chunk_size=chunk)
    return stepped(model, cache, ids, mask, split, each)


@torch.no_grad()
def stepped(model, cache, ids, mask, split, each=1):
    logits = []
    for start in range(split, ids.shape[1], each):
        own = mask[:, : start + each]
        where = positions_of(own)[:, start:]
        new = ids[:, start : start + each]
        logits.append(model(input_ids=new, attention_mask=own, position_ids=where, **{CACHE: cache}).logits)
    return torch.cat(logits, dim=1)


@torch.no_grad()
def masked_logits(model, spy, ids, mask, split=TOKENS):
    """The same by a full cache, whose layers are masked before each token to what was chosen for it."""
    heads, layers = model.config.num_key_value_heads, [*evicting(model)]
    whole = mask[:, None].bool().expand(-1, heads, -1)
    steps: dict[int, dict[int, Tensor]] = {}
    for layer_idx, _, _, seen_B, places, _ in spy.seen:
        kept = torch.zeros(len(ids), heads, ids.shape[1], dtype=torch.bool)
        for r, own in enumerate(places):
            b = r // heads
            kept[b, r % heads, [int((mask[b] == 0).sum()) + place for place in own]] = True
        column = max(int((mask[b] == 0).sum()) + seen for b, seen in enumerate(seen_B)) - 1
        steps.setdefault(column, {})[layer_idx] = kept
    cache, logits = full_cache(model), []
    with masked(model, [whole[:, :, :split]] * len(layers), mask) as kept:
        for start, stop in [(0, split), *((t, t + 1) for t in range(split, ids.shape[1]))]:
            if start:
                own = steps.get(start, {})
                kept[:] = [own.get(layer, whole)[:, :, :start] for layer in layers]
            where = positions_of(mask[:, :stop])[:, start:]
            new = {"input_ids": ids[:, start:stop], "attention_mask": mask[:, :stop], "position_ids": where}
            logits.append(model(**new, **{CACHE: cache}).logits)
    return torch.cat(logits[1:], dim=1)


@pytest.mark.parametrize(
    ("family", "name"),
    [*(("llama", name) for name in METHODS), *((own, "quest") for own in FAMILIES if own != "llama")]
    + [("qwen3", "fasa"), ("gemma3", "mpcache"), ("gemma3", "fasa")],
)
def test_an_answer_is_masked_dense_attention_over_what_was_chosen(family, name, table, monkeypatch):
    dtype = torch.float32 if family in SINGLE else torch.float64
    model, (ids, mask) = tiny_model(family, dtype=dtype), tiny_batch(FAMILIES[family], TOKENS + NEW)
    spy = Spy(monkeypatch)
    with retain.attach(model):
        cache = opened(model, name, table)
        got = decoded(model, cache, ids, mask)
    real = torch.ones_like(mask[:, TOKENS:], dtype=torch.bool)
    assert_close(got[real], masked_logits(model, spy, ids, mask)[real], dtype=torch.float32, ops=MODEL)
    layers = [*evicting(model)]
    assert {layer for layer, *_ in spy.seen} == {*layers} and len(spy.seen) == NEW * len(layers)
    with retain.attach(model):
        plain = decoded(model, Cache(model, policy=None), ids, mask)
    assert not torch.allclose(got, plain, atol=1e-3)  # the control
    assert cache.entries_held == cache.entries_seen and cache.evictions == 0


def page_scores(name, own, queries_GD, keys_TD, channels):
    """Scores of the pages of one row by loops; -inf where a page is unfilled and needs none."""
    page, T = own["page"], len(keys_TD)
    heads = []
    for q in queries_GD.double().tolist():
        scores = []
        for first in range(0, T, page):
            keys = keys_TD[first : first + page].double().tolist()
            columns = [[key[d] for key in keys] for d in range(len(q))]
            if name == "recency":
                scores.append(float(first))
            elif name == "fasa":
                scores.append(max(sum(q[c] * key[c] for c in channels) for key in keys))
            elif len(keys) < page:
                scores.append(-math.inf)
            elif name == "mpcache":
                scores.append(sum(x * (0.6 * max(c) + 0.4 * min(c)) for x, c in zip(q, columns, strict=True)))
            else:
                scores.append(sum(max(x * max(c), x * min(c)) for x, c in zip(q, columns, strict=True)))
        heads.append(scores)
    together = (lambda x: sum(x) / len(x)) if own.get("group") == "mean" else max
    return [together(column) for column in zip(*heads, strict=True)]


def best(scores, count, forced, among=None):
    """Pages chosen, by loops: those that are always read, then the best, of equal ones the later."""
    rest = [p for p in range(len(scores)) if p not in forced and (among is None or p in among)]
    rest.sort(key=lambda p: (scores[p], p), reverse=True)
    return sorted([*forced, *rest[: max(0, count - len(forced))]])


def ends(T, page, own):
    recent = own.get("recent", 1)
    return sorted({t // page for t in range(T) if t < own.get("sinks", 0) or t >= T - recent})


@pytest.mark.parametrize("name", [name for name in METHODS if name != "random"])
def test_the_choice_is_the_methods_by_plain_loops(name, table, monkeypatch):
    """Budget, bytes of the index and choice of every query and head anew, by 0.6 of the bytes."""
    model, (ids, mask) = tiny_model("llama", dtype=torch.float64), tiny_batch(PADS, TOKENS + NEW)
    H, D, size = 2, 8, 8
    entry, page, own = 2 * D * size, METHODS[name]["page"], METHODS[name]
    spy = Spy(monkeypatch)
    with retain.attach(model):
        cache = opened(model, name, table)
        decoded(model, cache, ids, mask)
    rows = {}
    if name == "fasa":
        lines = Path(table(model)).read_text().split("\n")
        rows = {layer: [float(cell) for cell in lines[layer].split("\t")] for layer in range(2)}
    total = [0] * len(PADS)
    for layer_idx, queries_BQD, keys, seen_B, places, counted in spy.seen:
        for r, keys_TD in enumerate(keys):
            T, channels = seen_B[r // H], []
            room, width = RATIO * T * entry, D * size
            if name == "fasa":
                agreement = rows[layer_idx][r % H * 4 : r % H * 4 + 4]
                chosen = sorted(range(4), key=lambda f: (-agreement[f], f))[:1]
                channels = [*chosen, *(f + 4 for f in chosen)]
            among, scores = (
                None,
                page_scores(own["by"], own, queries_BQD[r // H].view(H, -1, D)[r % H], keys_TD, channels),
            )
            index = {"quest": T // page * 2 * width, "fasa": T * 2 * size}.get(own["by"], 0)
            read = index
            if name == "mpcache":
                coarse = page_scores(
                    "mpcache", {"page": 8}, queries_BQD[r // H].view(H, -1, D)[r % H], keys_TD, []
                )
                always = ends(T, 8, own)
                wanted = max(int(0.5 * (T // 8)), math.ceil(int(room // entry) / 8)) + len(always)
                kept = best(coarse, wanted, always)
                among = {p for p in range(T // page) if p // 2 in kept}
                index = (T // 8 + min(T // page, 2 * min(wanted, math.ceil(T / 8)))) * width
                read = (T // 8 + len(among)) * width
            tail = (T - 1) % page + 1
            count = 1 + int((int((room - index) // entry) - tail) // page)
            want = best(scores, count, ends(T, page, own), among)
            assert places[r] == [t for p in want for t in range(p * page, min(T, (p + 1) * page))]
            if r % H == 0:
                first = counted[r // H]
            total[r // H] += len(places[r]) * entry + read
            assert len(places[r]) * entry + index <= room + 1e-6
            if r % H == H - 1:
                assert first[0] == entry * sum(len(places[r - h]) for h in range(H))
    found = [one.total * one.steps for one in cache.state.reader.bytes_read()]
    assert found == pytest.approx(total)
    report = cache.report().reading
    assert report.steps == NEW * len(PADS)
    assert report.bytes_read * report.steps == pytest.approx(sum(total))
    assert report.bytes_read <= RATIO * report.bytes_full
    assert "read a step" in str(cache.report())


@pytest.mark.always
@pytest.mark.parametrize("name", ["mpcache", "random"])
def test_a_batch_a_fork_a_crop_chunks_and_a_file_go_on_alike(name, table, tmp_path):
    model, (ids, mask) = attached("llama", dtype=torch.float64), tiny_batch(PADS, TOKENS + NEW)

    def make(**how):
        return opened(model, name, table, seeds=[4, 5, 6], **how)

    want = decoded(model, make(), ids, mask)
    same = {"dtype": torch.float32, "ops": MODEL}

    assert_close(decoded(model, make(), ids, mask, chunk=9), want, **same)
    for b, pad in enumerate(PADS):
        alone = opened(model, name, table, seeds=[4 + b])
        got = decoded(model, alone, ids[b : b + 1, pad:], mask[b : b + 1, pad:], split=TOKENS - pad)
        assert_close(got, want[b : b + 1], **same)

    cache = make()
    decoded(model, cache, ids[:, : TOKENS + 3], mask[:, : TOKENS + 3])
    fork = cache.fork()
    path = cache.save(tmp_path / "read.safetensors")
    rest = stepped(model, cache, ids, mask, TOKENS + 3)
    assert_close(rest, want[:, 3:], **same)
    loaded = Cache.load(path, model)
    for other in (fork, loaded):
        assert_close(stepped(model, other, ids, mask, TOKENS + 3), rest, **same)
        assert other.report().reading == cache.report().reading
    cache.crop(TOKENS + 1)
    others = torch.where(mask.bool(), (ids + 1) % 90 + 2, ids)
    other = torch.cat([ids[:, : TOKENS + 1], others[:, TOKENS + 1 :]], dim=1)
    assert_close(
        stepped(model, cache, other, mask, TOKENS + 1), decoded(model, make(), other, mask)[:, 1:], **same
    )
    cache.crop(TOKENS)
    cache.batch_select_indices(torch.tensor([2, 0, 2]))
    rows = [2, 0, 2]
    assert_close(stepped(model, cache, ids[rows], mask[rows], TOKENS), want[rows], **same)
    cache.reset()
    assert cache.report().reading.steps == 0


def test_beams_follow_their_own_index(monkeypatch):
    """As if the index were made anew at every step."""
    model, (ids, mask) = attached("llama", dtype=torch.float64), tiny_batch(PADS, TOKENS)
    how = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False, "output_logits": True}

    def beams():
        cache = opened(model, "mpcache")
        given = {"input_ids": ids, "attention_mask": mask, CACHE: cache, "return_dict_in_generate": True}
        return model.generate(**given, **how), cache.report().reading

    got, read = beams()
    own = reader.Reader.begin

    def begin(this, *args):
        this.forget()
        return own(this, *args)

    monkeypatch.setattr(reader.Reader, "begin", begin)
    want, again = beams()
    assert torch.equal(got.sequences, want.sequences) and read == again
    for a, b in zip(got.logits, want.logits, strict=True):
        assert_close(a, b, dtype=torch.float32, ops=MODEL)


def test_the_tokens_of_a_question_choose_one_after_another_if_asked_to():
    """Else they read everything, and are not counted."""
    model, (ids, mask) = attached("llama", dtype=torch.float64), tiny_batch(PADS, TOKENS + 6)
    mask[1, TOKENS + 1] = 0  # padding inside the question
    choosing = opened(model, "quest", reading={"questions": True})
    want = decoded(model, opened(model, "quest"), ids, mask)
    got = decoded(model, choosing, ids, mask, each=6)
    real = mask[:, TOKENS:].bool()
    assert_close(got[real], want[real], dtype=torch.float32, ops=MODEL)
    assert choosing.report().reading.steps == int(real.sum())
    whole = opened(model, "quest")
    got = decoded(model, whole, ids, mask, each=6)
    plain = decoded(model, Cache(model, policy=None), ids, mask, each=6)
    assert_close(got[real], plain[real], dtype=torch.float32, ops=MODEL)
    assert whole.report().reading.steps == 0


@pytest.mark.parametrize("stated", [{"keep_ratio": 1.0}, {"tokens_per_head": 60}, {"bytes": 10**6}])
def test_a_budget_that_covers_everything_gives_the_full_caches_logits(stated):
    model, (ids, mask) = attached("llama", dtype=torch.float64), tiny_batch(PADS, TOKENS + NEW)
    policy = Policy("mine", reading=Reading(page=4))
    cache = Cache(model, policy, regime="select", **stated)
    assert torch.equal(decoded(model, cache, ids, mask), decoded(model, Cache(model, policy=None), ids, mask))
    read = cache.report().reading
    assert read.bytes_read == read.bytes_full and read.bytes_index == read.index_held == 0


def test_layers_that_are_read_whole_are_paid_for_and_counted():
    model, (ids, mask) = attached("qwen3", dtype=torch.float64), tiny_batch((0,), TOKENS + NEW)
    cache = opened(model, "quest", reading={"whole_layers": 1})
    decoded(model, cache, ids, mask)
    read = cache.report().reading
    own = cache.state.reader.read[0]
    assert int(own[0, 0]) * 3 == read.bytes_full * read.steps and int(own[0, 1]) == 0
    assert 0.45 * read.bytes_full < read.bytes_read <= RATIO * read.bytes_full


def test_a_budget_that_is_too_small_is_found_before_anything_is_read():
    model, (ids, mask) = attached("llama", dtype=torch.float64), tiny_batch(PADS, TOKENS + NEW)
    cache = opened(model, "quest", bytes=1500, short="raise")
    refused(
        "policy 'quest' may read 1500 bytes of a sequence of 46 tokens",
        cache.prefill,
        ids[:, :TOKENS],
        mask[:, :TOKENS],
    )
    assert cache.num_seen == 0
    # A short sequence is read whole.
    cache = opened(model, "quest", bytes=1500)
    assert torch.equal(decoded(model, cache, ids, mask), decoded(model, Cache(model, policy=None), ids, mask))


def test_what_reads_and_what_evicts_are_told_apart(table):
    model = attached("llama", dtype=torch.float64)
    refused(
        "'quest' evicts nothing: .*Take regime='select'; what evicts by QUEST's bounds is 'quest_evict'",
        Cache,
        model,
        "quest",
        keep_ratio=0.5,
        reading={"whole_layers": 0},
    )
    refused(
        "policy 'snapkv' evicts, and regime 'select' holds everything",
        Cache,
        model,
        "snapkv",
        keep_ratio=0.5,
        regime="select",
    )
    refused(
        "regime is 'selct' .did you mean 'select'",
        Cache,
        model,
        "quest",
        keep_ratio=0.5,
        regime="selct",
        reading={"whole_layers": 0},
    )
    refused(
        "reads the first 2 layers whole, and the model has 2",
        Cache,
        model,
        "quest",
        keep_ratio=0.5,
        regime="select",
    )
    mine = Policy("mine", reading=Reading(page=4))
    for stated in ({"bytes_total": 5000}, {"keep_ratio": 0.5, "page": 4}):
        refused("says what stays, and policy 'mine' holds", Cache, model, mine, regime="select", **stated)
    refused("pinned and tokenizer would not be read", opened, model, "quest", pinned=[(0, 2)])
    windowed = attached("mistral_window", dtype=torch.float64)
    refused("layers \\[0, 1, 2\\] look back on a sliding window", opened, windowed, "quest")
    other = attached("cohere", dtype=torch.float64)
    refused(
        "looks at RoPE pairs, of which this model's heads have none that are understood",
        Cache,
        other,
        Policy("fasa", reading=Reading(by="fasa", dominant_pairs=table(model))),
        keep_ratio=0.5,
        regime="select",
    )
    refused("policy 'quest' evicts nothing", decide_layers, load_policy("quest"), [], Budget(keep_ratio=0.5))
    (problem,) = problems_of_policy(load_policy("mpcache"))
    assert "blocks of the engine are read whole: take 'quest_evict'" in problem
    ids, mask = tiny_batch(PADS, TOKENS)
    caches = [opened(model, "quest").prefill(ids, mask) for _ in range(2)]
    refused("caches that choose what is read cannot be stacked", Cache.concat, caches)
    held = Cache(model, policy=None).prefill(ids, mask, evict=False, hold_evidence=True)
    refused("policy 'quest' evicts nothing", held.evict, "quest", keep_ratio=0.5, reading={"whole_layers": 0})
