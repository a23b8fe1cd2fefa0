"""A cache for each episode of a context: clusters, what a patched prompt keeps, routing, bytes."""

import itertools
import math

import pytest
import torch

import retain
from retain.hf.cache.cache import Cache
from retain.hf.episodes.episodes import Episodes, mean_embedding, spans_of
from retain.hf.episodes.kmeans import kmeans
from retain.hf.episodes.patched_prompt import prefill_patched
from retain.hf.intercept.attach import attach
from retain.hf.version_names import CACHE
from tests.tiny import tiny_model


def ids_of(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 97, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model():
    own = tiny_model("qwen3")
    with attach(own):
        yield own


def held(cache: Cache) -> list[list[list[int]]]:
    """Positions of each KV head of each layer."""
    return [
        [layer.store.row(0, head)[2].tolist() for head in range(spec.num_kv_heads)]
        for layer, spec in zip(cache.state.ragged, cache.state.specs, strict=True)
    ]


# Clusters


def naive_inertia(vectors: list[list[float]], labels: tuple[int, ...]) -> float:
    total = 0.0
    for cluster in set(labels):
        own = [vector for vector, label in zip(vectors, labels, strict=True) if label == cluster]
        centre = [sum(numbers) / len(own) for numbers in zip(*own, strict=True)]
        total += sum((x - c) ** 2 for vector in own for x, c in zip(vector, centre, strict=True))
    return total


@pytest.mark.parametrize("seed", range(4))
def test_kmeans_finds_the_best_of_all_partitions(seed):
    vectors = torch.randn(8, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    parts = [labels for labels in itertools.product(range(3), repeat=8) if len(set(labels)) == 3]
    best = min(naive_inertia(vectors.tolist(), labels) for labels in parts)
    found = kmeans(vectors, 3)
    assert math.isclose(found.inertia, best)
    assert math.isclose(naive_inertia(vectors.tolist(), tuple(found.labels_N.tolist())), best)
    for number, centroid in enumerate(found.centroids_KE):
        assert torch.allclose(centroid, vectors[found.labels_N == number].mean(0))
    assert list(dict.fromkeys(found.labels_N.tolist())) == [0, 1, 2]


def test_kmeans_is_the_same_on_every_run_and_leaves_no_cluster_empty():
    vectors = torch.randn(30, 4, generator=torch.Generator().manual_seed(1))
    assert torch.equal(kmeans(vectors, 5, seed=3).labels_N, kmeans(vectors, 5, seed=3).labels_N)
    same = kmeans(torch.ones(6, 3), 4)
    assert sorted(set(same.labels_N.tolist())) == [0, 1, 2, 3] and same.inertia == 0.0
    assert kmeans(vectors, 30).inertia == 0.0
    with pytest.raises(ValueError, match="30 vectors make 1 to 30 clusters, got 31"):
        kmeans(vectors, 31)
    with pytest.raises(ValueError, match="not finite"):
        kmeans(torch.full((3, 2), math.nan), 2)


# A patched prompt


def naive_held(evidence, asked: int, chunk: int, tokens_per_head: int) -> list[list[int]]:
    """What each head of one layer holds, block after block: by the largest attention of a query of the prompt
    and a head of the group, as if nothing of an earlier prompt had been there. `evidence[c]` shows the
    context up to block c and the prompt behind it, whose keys and queries no eviction below has changed."""
    kept: list[list[int]] = [[], []]
    for number, shown in enumerate(evidence):
        queries, keys = shown.queries_BQSD[0].double(), shown.keys_BHTD[0].double()
        total, group = keys.shape[1], len(queries) // len(keys)
        end, scored = total - asked, []
        for h in range(2):
            entries = [*kept[h], *range(number * chunk, end)]
            best = dict.fromkeys(entries, 0.0)
            for q in range(h * group, (h + 1) * group):
                for j in range(end, total):
                    seen = [*entries, *range(end, j + 1)]
                    logits = [float(queries[q, j] @ keys[h, i]) * shown.scaling for i in seen]
                    norm = sum(math.exp(x) for x in logits)
                    for i, x in zip(seen, logits, strict=True):
                        if i < end:
                            best[i] = max(best[i], math.exp(x) / norm)
            scored += [(paid, i, h) for i, paid in best.items()]
        scored.sort(reverse=True)
        kept = [sorted(i for _, i, own in scored[: 2 * tokens_per_head] if own == h) for h in range(2)]
    return kept


@pytest.mark.parametrize("chunk", [60, 25])
def test_a_patched_prompt_keeps_what_it_attends_to(chunk):
    one = tiny_model("llama", num_hidden_layers=1)
    ids, prompt, budget = ids_of(60), ids_of(7, seed=1), 11
    evidence = []
    with attach(one):
        for stop in [*range(chunk, 60, chunk), 60]:
            whole = Cache(one, None).prefill(
                torch.cat([ids[:, :stop], prompt], dim=1), evict=False, hold_evidence=True
            )
            evidence.append(whole.evidence[0])
        cache = prefill_patched(one, ids, prompt, tokens_per_head=budget, chunk_size=chunk)
    naive = naive_held(evidence, 7, chunk, budget)
    assert held(cache) == [naive] and sum(map(len, naive)) == 2 * budget
    assert len(naive[0]) != len(naive[1])  # heads share


@pytest.mark.parametrize("chunk", [None, 32])
def test_a_patched_prompt_leaves_no_trace(model, chunk):
    """With room for everything the cache goes on as the full one, and counts the context alone."""
    ids, question = ids_of(80), ids_of(5, seed=2)
    cache = prefill_patched(model, ids, ids_of(9, seed=1), tokens_per_head=80, chunk_size=chunk)
    full = Cache(model, None).prefill(ids)
    assert cache.num_seen == 80 and cache.entries_held == full.entries_held
    asked = torch.cat([ids, question], dim=1)
    want = model(input_ids=asked, use_cache=True, **{CACHE: Cache(model, None)}).logits[:, -5:]
    got = model(input_ids=question, use_cache=True, **{CACHE: cache}).logits
    assert torch.allclose(got, want, atol=1e-4)


def test_what_comes_after_the_context_is_held_and_can_be_forgotten(model, tmp_path):
    ids, question = ids_of(80), ids_of(30, seed=2)
    cache = prefill_patched(model, ids, ids_of(9, seed=1), tokens_per_head=12, chunk_size=32)
    before, evictions = held(cache), cache.evictions
    assert evictions == 3
    model.generate(torch.cat([ids, question], dim=1), **{CACHE: cache}, max_new_tokens=4)
    assert cache.num_seen == 80 + 33 and cache.evictions == evictions
    assert cache.entries_held == sum(len(row) + 33 for layer in before for row in layer)
    cache.crop(80)
    assert held(cache) == before
    cache.save(tmp_path / "own.safetensors")
    assert held(Cache.load(tmp_path / "own.safetensors", model)) == before


def test_settings_of_the_policy_hold_beside_the_prompt(model):
    kept = prefill_patched(
        *(model, ids_of(80), ids_of(9, seed=1)),
        tokens_per_head=12,
        chunk_size=32,
        policy="snapkv",
        protection={"sinks": 4, "prefix_fraction": 0.0, "suffix_fraction": 0.0},
    )
    assert all(row[:4] == [0, 1, 2, 3] and len(row) == 12 for layer in held(kept) for row in layer)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"policy": "knorm"}, "'knorm' looks at no window"),
        ({"tokens_per_head": 0}, "tokens_per_head is 0"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        (
            {"observed_settings": {"window": 3}, "protection": {"recent": 50}, "regime": "prefill"},
            r"regime, observed_settings\.window, protection\.recent: .* leave them out",
        ),
        ({"prompt_ids": torch.ones(2, 3, dtype=torch.int64)}, "one sequence each, got 1 and 2"),
    ],
)
def test_requests_that_are_refused(model, change, match):
    stated = {"input_ids": ids_of(40), "prompt_ids": ids_of(5), "tokens_per_head": 9, **change}
    with pytest.raises(ValueError, match=match):
        prefill_patched(model, **stated)


@pytest.mark.parametrize(("family", "after"), [("gemma3", 16), ("mistral_window", 24), ("qwen3_next", 0)])
def test_layers_that_let_go_by_themselves_are_refused(family, after):
    own = tiny_model(family)
    with attach(own), pytest.raises(ValueError, match=f"lets go of tokens after {after}"):
        prefill_patched(own, ids_of(40), ids_of(5), tokens_per_head=9)
    if after:
        with attach(own):
            short = prefill_patched(own, ids_of(after - 6), ids_of(5), tokens_per_head=after)
        assert short.num_seen == after - 6


# Episodes

TOPICS = torch.arange(1, 61).view(3, 20)  # words of each topic, in no other


def topical(seed: int = 0) -> tuple[torch.Tensor, list[int]]:
    """Nine segments of 16 tokens, and the topic of each."""
    order, draw = [0, 1, 2, 1, 0, 2, 2, 1, 0], torch.Generator().manual_seed(seed)
    parts = [TOPICS[topic][torch.randint(20, (16,), generator=draw)] for topic in order]
    return torch.cat(parts)[None], order


@pytest.mark.parametrize("embed", ["mean", "counts"])
def test_segments_of_a_topic_are_an_episode_and_its_questions_go_there(model, embed):
    def counts(texts):
        return torch.stack([torch.bincount(torch.tensor(ids), minlength=97).double() for ids in texts])

    ids, order = topical()
    read = Episodes.read(
        *(model, ids),
        tokens_per_head=30,
        budget="together",
        num_episodes=3,
        segments=16,
        chunk_size=64,
        embed=counts if embed == "counts" else None,
    )
    for topic, episode in enumerate(read.episodes):
        assert [order[segment] for segment in episode.segments] == [topic] * 3
        question = TOPICS[topic][None]
        assert read.nearest(question) == topic
        fork, before = read.route(question), held(episode.cache)
        assert held(fork) == before
        model.generate(torch.cat([ids, question], dim=1), **{CACHE: fork}, max_new_tokens=2)
        assert held(episode.cache) == before and episode.cache.num_seen == ids.shape[1]


def test_the_embedding_is_the_mean_of_the_models_own(model):
    table = model.get_input_embeddings().weight.double()
    got = mean_embedding(model)([[3, 5, 5], [7]])
    assert torch.allclose(got, torch.stack([(table[3] + 2 * table[5]) / 3, table[7]]))


def test_the_patched_prompt_is_the_medoids_behind_the_instruction(model):
    ids, instruction = topical()[0], ids_of(4, seed=5)
    stated = {"tokens_per_head": 12, "chunk_size": 64}
    read = Episodes.read(
        *(model, ids),
        budget="each",
        num_episodes=3,
        segments=16,
        medoids=2,
        instruction_ids=instruction,
        **stated,
    )
    vectors = mean_embedding(model)([ids[0, start : start + 16].tolist() for start in range(0, 144, 16)])
    for episode in read.episodes:
        own = [vectors[segment] / vectors[segment].norm() for segment in episode.segments]
        centre = sum(own) / len(own)
        near = [float(vector @ centre) for vector in own]
        best = sorted(range(len(own)), key=lambda place: -near[place])[:2]
        assert sorted(episode.segments[place] for place in best) == list(episode.medoids)
        parts = [ids[:, 16 * segment : 16 * segment + 16] for segment in episode.medoids]
        prompt = torch.cat([instruction, *parts], dim=1)
        assert held(episode.cache) == held(prefill_patched(model, ids, prompt, **stated))
    assert len({str(held(episode.cache)) for episode in read.episodes}) == 3


@pytest.mark.parametrize(("budget", "each"), [("together", 10), ("each", 32)])
def test_bytes_of_all_caches_are_counted_together(model, budget, each):
    read = Episodes.read(
        *(model, topical()[0]), tokens_per_head=32, budget=budget, num_episodes=3, segments=16, chunk_size=64
    )
    spec = read.episodes[0].cache.state.specs[0]
    entry = 2 * spec.head_dim * 4
    assert read.bytes_held() == 3 * each * 3 * spec.num_kv_heads * entry
    assert read.bytes_allocated() >= read.bytes_held()
    said = read.report()
    assert f"budget {budget}, 32 entries a head" in said and f"{read.bytes_held():,}" in said
    assert ("all caches share it" in said) == (budget == "together")


def test_spans_and_budgets_that_are_none(model):
    assert spans_of(16, 40) == ((0, 16), (16, 32), (32, 40))
    assert spans_of([(0, 5), (7, 40)], 40) == ((0, 5), (7, 40))
    ids = ids_of(40)
    stated = {"tokens_per_head": 9, "budget": "together", "segments": 8}
    for change, match in [
        ({"budget": "all"}, "'all'"),
        ({"segments": [(0, 41)]}, "spans"),
        ({"segments": []}, "at least one"),
        ({"num_episodes": 6}, "the history has 5 segments, and num_episodes=6 clusters"),
        ({"num_episodes": 0}, "num_episodes is 0"),
        ({"tokens_per_head": 3}, "less than one in each"),
        ({"embed": lambda texts: torch.ones(2, 3)}, "embed gave .2, 3. for 5 texts"),
        ({"embed": lambda texts: [[1.0]] * len(texts)}, "embed gave list for 5 texts"),
        ({"instruction_ids": torch.ones(2, 3, dtype=torch.int64)}, "an instruction is one sequence, got 2"),
    ]:
        with pytest.raises(ValueError, match=match):
            Episodes.read(model, ids, **{**stated, **change})


def test_the_preset_of_a_patched_prompt_says_what_the_release_does():
    policy = retain.load_policy("snapkv:patched")
    own = {name: policy.observed_settings[name] for name in ("pool", "aggregate", "group")}
    assert own == {"pool": None, "aggregate": "max", "group": "max"} and policy.scope == "layer"
    kept = policy.protection
    assert (kept.sinks, kept.prefix_fraction, kept.suffix_fraction) == (0, 0, 0)
