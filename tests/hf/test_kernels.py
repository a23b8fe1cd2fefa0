"""Generation with every op on its kernel keeps what the plain path keeps, entry by entry, and says what a
full cache says under a mask of what was kept.

Kernels run in Triton's interpreter here, and on the device where there is one (marked `gpu`). Scores of the
two paths differ by rounding, so two runs can only be asked to agree where no decision hangs on it: each case
shows first, on the plain path alone, that scores which are off by many times the rounding decide the same,
and then that the scores of the two paths are no further apart than that.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

import retain
from retain import eviction as request
from retain.hf.cache.cache import Cache
from retain.hf.version_names import CACHE
from retain.kernels import backend
from retain.presets import Policy
from retain.scores import Score
from tests.close import MODEL, assert_close
from tests.evictions import small
from tests.hf.masked import masked_logits
from tests.hf.regime_runs import gates_of, held_by
from tests.tiny import tiny_batch, tiny_model

# Relative; and how often the plain path is asked again with scores that are off by so much.
NOISE, DRAWS = 2e-5, 3
PADS, TOKENS, NEW, EVERY = (0, 7), 45, 9, 4
# name -> what is changed of the preset, so that all stages are on: protection is in every preset, and these
# share their budget between heads or layers.
POLICIES = {"learned": {"scope": "model"}, "defensivekv": {}, "layer_defensivekv": {}, "lava": {}}
# All their statistics of attention are of pooled windows, which are plain PyTorch.
POOLED = ("defensivekv", "layer_defensivekv", "snapkv", "adakv", "criticalkv")
# Run on a device only, where a run is cheap.
ON_A_GPU = ("snapkv", "adakv", "criticalkv")
BUDGET = {"keep_ratio": 0.4}
# Evicting while decoding goes through all that a prefill's eviction does; sinks and sliding windows.
MATRIX = [
    *((name, "llama", "prefill") for name in POLICIES),
    *((name, "qwen3", "prefill+decode") for name in POLICIES),
    *((name, "gpt_oss", "prefill+decode") for name in ("learned", "lava")),
]


@dataclass
class Run:
    """What came of one generation.

    Args:
        tokens: that were generated, with the prompt.
        logits: of each that was generated, `[B, V]`.
        held: which tokens each layer holds in the end, `[B, H, T]`.
        scores: as they were made, moment by moment and layer by layer.
        evictions: moments at which entries went.
    """

    tokens: Tensor
    logits: list[Tensor]
    held: list[Tensor]
    scores: list[Score] = field(default_factory=list)
    evictions: int = 0


@contextmanager
def watched(change: Callable[[Score], Score] = lambda score: score) -> Iterator[list[Score]]:
    """Inside, every score that a cache decides by is noted down, and changed."""
    made: list[Score] = []
    own = request.score_entries

    def score_entries(*args, **kwargs) -> Score:
        made.append(own(*args, **kwargs))
        return change(made[-1])

    request.score_entries = score_entries
    try:
        yield made
    finally:
        request.score_entries = own


def noisy(seed: int, device: torch.device) -> Callable[[Score], Score]:
    """Every number of a score off by at most `NOISE`, each in its own way, but equal ones alike.

    What a pool or a floor makes equal is equal on either path, and ties have an order of their own.
    """
    draw = torch.Generator(device).manual_seed(seed)

    def off(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        numbers, which = values.unique(return_inverse=True)
        shift = torch.rand(numbers.shape, generator=draw, device=device, dtype=values.dtype) * 2 - 1
        return values * (1 + NOISE * shift[which])

    def change(score: Score) -> Score:
        return replace(
            score,
            values_BHT=off(score.values_BHT),
            first_BHT=off(score.first_BHT),
            layer_weight_B=off(score.layer_weight_B),
        )

    return change


@torch.no_grad()
def generated(model, policy: Policy, regime: str, change: Callable[[Score], Score] | None = None) -> Run:
    device = model.device
    ids, mask = (part.to(device) for part in tiny_batch(PADS, TOKENS))
    gates = gates_of(model) if policy.learned else None
    with retain.attach(model), watched(change or (lambda score: score)) as scores:
        cache = Cache(model, policy, gates=gates, regime=regime, every=EVERY, **BUDGET)
        given = {"input_ids": ids, "attention_mask": mask, CACHE: cache}
        how = {"output_logits": True, "return_dict_in_generate": True}
        out = model.generate(**given, max_new_tokens=NEW, do_sample=False, disable_compile=True, **how)
        seen = torch.cat([mask, mask.new_ones(len(mask), NEW - 1)], dim=1).cpu()
        return Run(out.sequences, list(out.logits), held_by(cache, seen), scores, cache.evictions)


def apart(one: Score, other: Score) -> float:
    """Largest difference of two scores, relative to the number itself, or to a thousandth of the head's
    largest where the number is smaller than that."""
    worst = 0.0
    for a, b in ((one.values_BHT, other.values_BHT), (one.first_BHT, other.first_BHT)):
        if a is None or b is None:
            assert a is b
            continue
        assert torch.equal(a.isfinite(), b.isfinite())
        a, b = (x.double().masked_fill(~x.isfinite(), 0.0) for x in (a, b))
        size = torch.maximum(b.abs(), 1e-3 * b.abs().amax(-1, keepdim=True))
        worst = max(worst, float(((a - b).abs() / size.clamp_min(1e-30)).max()))
    return worst


def assert_same_run(got: Run, want: Run) -> None:
    assert torch.equal(got.tokens, want.tokens)
    assert got.evictions == want.evictions
    for layer, (one, two) in enumerate(zip(got.held, want.held, strict=True)):
        wrong = (one != two).nonzero().tolist()
        assert not wrong, f"layer {layer}: {wrong} (sequence, head, token)"


@contextmanager
def launched() -> Iterator[set[str]]:
    """Names of the ops that took their kernels inside."""
    names: set[str] = set()
    own = backend.path_for

    def path_for(op: str, *args, **kwargs) -> backend.Path:
        path = own(op, *args, **kwargs)
        if path == "triton":
            names.add(op)
        return path

    backend.path_for = path_for
    try:
        yield names
    finally:
        backend.path_for = own


def expected_ops(policy: Policy) -> set[str]:
    """All that such a generation goes through."""
    return {"ragged_attention"} | (set() if policy.name in POOLED else {"attention_stats"})


def agree(model, policy: Policy, regime: str, kernels: str | None) -> None:
    """Kernels, forced or by themselves, keep what the plain path keeps and write what it writes."""
    with backend.using("reference"):
        plain = generated(model, policy, regime)
        for seed in range(DRAWS):
            off = generated(model, policy, regime, noisy(seed, model.device))
            assert_same_run(off, plain)  # or else a decision hangs on rounding: take another seed
    with launched() as ops, backend.using(kernels) if kernels else nullcontext():
        fast = generated(model, policy, regime)
    assert ops == expected_ops(policy)
    assert_same_run(fast, plain)
    assert len(fast.scores) == len(plain.scores) > 0
    for one, two in zip(fast.scores, plain.scores, strict=True):
        assert apart(one, two) <= NOISE
    # Something was at stake: entries went, and heads keep different ones.
    assert sum(int(layer.sum()) for layer in plain.held) < 0.6 * sum(layer.numel() for layer in plain.held)
    assert all(bool((layer != layer[:, :1]).any()) for layer in plain.held)


def case(name: str, heads_file: str) -> Policy:
    return replace(small(name, heads_file), **POLICIES.get(name, {}))


def as_the_oracle(family: str, dtype: torch.dtype, run: Run) -> None:
    """The logits of a run that evicted once are those of a full cache under a mask of what it kept, by the
    project's rule: as good as plain PyTorch in the same precision."""
    ids, mask = tiny_batch(PADS, TOKENS)
    chunks = [ids, *run.tokens[:, TOKENS:-1].cpu().split(1, dim=1)]
    keep = [layer[:, :, :TOKENS] for layer in run.held]
    seen = torch.cat([mask, mask.new_ones(len(mask), NEW - 1)], dim=1)
    exact, plain = (
        torch.stack([logits[:, -1] for logits in masked_logits(model, keep, chunks, seen)])
        for model in (tiny_model(family, dtype=torch.float64), tiny_model(family, dtype=dtype))
    )
    got = torch.stack(run.logits).cpu()
    assert_close(got.double(), exact, plain.double(), dtype=dtype, ops=MODEL)
    # The rule is wide in bfloat16: they are much nearer to these than to a full cache's, behind the prompt.
    everything = masked_logits(tiny_model(family, dtype=torch.float64), None, chunks, seen)
    other = torch.stack([logits[:, -1] for logits in everything])
    apart, off = ((one - exact)[1:].abs().mean() for one in (other, got.double()))
    assert 10 * off < apart


def both_paths(name: str, dtype: torch.dtype, device: str, kernels: str | None, heads_file: str) -> None:
    """In either precision, kernels keep what the plain path keeps of a prompt, and say what the oracle says.

    Both paths read the prompt alike, so their scores differ by their own rounding alone, in bfloat16 too.
    """
    model, policy = tiny_model("llama", dtype=dtype).to(device), case(name, heads_file)
    with backend.using("reference"):
        plain = generated(model, policy, "prefill")
        off = generated(model, policy, "prefill", noisy(0, model.device))
    with launched() as ops, backend.using(kernels) if kernels else nullcontext():
        fast = generated(model, policy, "prefill")
    assert ops == expected_ops(policy)
    for one, two, three in zip(fast.held, plain.held, off.held, strict=True):
        assert torch.equal(two, three)  # or else a decision hangs on rounding: take another seed
        assert torch.equal(one[:, :, :TOKENS], two[:, :, :TOKENS])
    for run in (plain, fast):
        as_the_oracle("llama", dtype, run)


@pytest.mark.parametrize(("name", "family", "regime"), MATRIX)
def test_kernels_keep_what_the_plain_path_keeps(name, family, regime, heads_file):
    agree(tiny_model(family), case(name, heads_file), regime, "triton")


@pytest.mark.parametrize(("name", "dtype"), [("learned", torch.bfloat16)])
def test_both_paths_say_what_the_oracle_says(name, dtype, heads_file):
    both_paths(name, dtype, "cpu", "triton", heads_file)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["learned", "lava", *ON_A_GPU])
def test_both_paths_say_what_the_oracle_says_on_a_gpu(name, dtype, heads_file):
    both_paths(name, dtype, "cuda", None, heads_file)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "family", "regime"), [*MATRIX, *((name, "llama", "prefill+decode") for name in ON_A_GPU)]
)
def test_kernels_keep_what_the_plain_path_keeps_on_a_gpu(name, family, regime, heads_file):
    """As a user runs it: nothing is forced, and CUDA takes its kernels."""
    agree(tiny_model(family).cuda(), case(name, heads_file), regime, None)
