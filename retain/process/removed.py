"""Names that went, and what to use now, for the errors of configs, calls and commands that still say them.

CHANGELOG.md has all of it; the tree of 2026-11-29, commit 7fe4f9b, has the code.
"""

import re
from collections.abc import Mapping

# The last words of a config's key, or names of a registry -> what to use now. A variant, `policy:variant`, is
# two words.
TABLE = """
engine engine_settings served -> question=[known], through retain.Cache
regimes -> when (prefill, chunk, decode) and question (known, unknown)
context_only -> when=[prefill] question=[unknown]
query_aware -> when=[prefill] question=[known]
suite suites -> tasks alone, e.g. tasks=[reference] or tasks=[ruler]
text -> task_settings for its changes, and chat, dtype, revision, device_map as keys
template -> chat alone, with the template's defaults
batch_items -> max_sequences: a context is read alone, and its candidates are decoded together
unit_items workers -> accelerate launch --num_processes N
preset_protection under -> protections, which every policy is measured under too
gate_sets uses -> a variant that names its gates: [learned, gates=FOLDER]
temperature cache_dtype -> nothing in its place: answers are greedy, in dtype
token_identity control_documents -> the control oracle
longbench_v2 scbench synthqa -> a jsonl file or a hub data set as a task, eval/README.md
ruler_all -> match_all
ruler_part -> match_any
page -> the budget alone, which is exact; vLLM's plug-in rounds its own to whole blocks
reinforce -> stage local
knots -> nothing in its place: a curve has 16
plan -> train/distill.py --dry-run, which makes one step and measures it
chunk -> training.micro_batch or data.pack_tokens, which bound the tokens of a forward
features -> no folder: every step asks the frozen model
selection -> each head keeps its own tokens
reading quest fasa mpcache -> the preset quest_evict
select -> when, which says when to evict
regime -> when of retain.Cache (prefill, chunk, decode); in a policy's YAML evaluated
patched compresskv retrieval_heads -> snapkv
released -> the policy's name alone, or the authors' code
adakv.paper ada_criticalkv.paper lava.code cake.code -> the policy's name alone
defensivekv.code layer_defensivekv.code -> observed_settings.norm=head_share, the code's norm
head_classes head_importance -> allocation.weights, JSON of a number a head
query_centres -> a .pt file of statistics from TriAttention's own code
head_threshold -> python -m retain.eval.head_weights, by which half of the heads retrieve
h2o.chunk lru.chunk vatp.chunk keyformer.chunk lazy_eviction.chunk target.chunk
    -> leave it out: it changed no result
cake.variance -> leave it out: the paper's, over queries
snapkv.order cake.order vatp.order snapkv.aggregate defensive.aggregate defensive.value_norm_place
    critical.norm vatp.pool vatp.pool_size observed_risk.pool observed_risk.pool_size keydiff.anchor
    lagkv.compete quest.group triattention.over triattention.normalise expected_attention.covariance
    expected_attention.epsilon -> leave it out: the score is as its authors released it
importance_beta -> python -m retain.eval.head_weights, with HeadKV's beta of 1.5
errors layer_errors layer_least layer_most -> allocation.layers: pyramid, cake or entropy
mass_released mass_press -> first_stage.by: mass
allocation.rounding -> nothing in its place, since budgets are exact
allocation.spread -> nothing in its place: what a layer cannot hold goes to the others by weight
allocation.normalise floor -> nothing in its place: heads compete by the score itself
allocation.line -> nothing in its place, since a pyramid always spreads what protection leaves
counted convex -> allocation.safeguard: guaranteed
force_window -> protection.recent
prefix_tokens force_sinks recency.sinks -> protection.sinks
suffix_tokens protection.suffix -> protection.recent, or pinned spans
capacity -> a keep_ratio at which your own tasks hold
quotas -> scope: model, where heads share a budget by score
fusion_weights prior veto log_linear -> fusion: sum or max
calibration.window calibration.grid -> leave it out
remap calibration.scale -> calibration.kind: shared, with which the command that trained the gates only
    calibrates again
settings.targets -> leave it out: a lookahead gate adapts attention and MLP, as its paper does
settings.reduce -> leave it out: the mean over a group's query heads, as the paper has it
calibrated -> a number in 0..1
mikv arkv think -> precision: {bits: 4, recent: 8} with any policy
kvmerger d2o -> the preset merge, or correction: {threshold: 0.8} with any policy
precision.keys precision.group -> the one layout, keys by channel over 32 entries and values by entry over
    32 channels
precision.rest precision.full precision.full_layers -> recent, the last entries that stay as they are
precision.balance precision.channels precision.channel_heads -> bits, of whole keys
correction.among correction.weighting correction.keys -> threshold and recent: values become means of all
    alike in the head
context.causal -> leave it out: an entry sees itself and earlier ones
correction.count -> leave it out: merged entries always count for all that they stand for
moving -> a number in -1..1
correction.ridge correction.weights correction.queries -> correction: {threshold: 0.8}
layer_weight -> observed: cake, which weighs layers
retain.every -> retain.Cache with when='prefill+decode', in transformers
retain.chunked -> vLLM's own chunked prefill, or retain.Cache with when='chunk'
retain.documents retain.document_blocks retain.document -> vLLM's prefix cache with keep_ratio=1.0, or
    cache.fork() with transformers
retain.off -> retain.keep_ratio=1.0
retain.seed -> the seed of the request's sampling
bytes_total -> bytes, of each sequence
protection.turns protection.turn_prefix protection.turn_suffix tokenizer -> pinned spans of the first
    prompt, or protection.recent
study claims fused-claims inspect -> retain compare, and its report
infinitebench longproc -> lm-eval's tasks of that name, docs/lm_eval.md
mathematics gsm8k aime -> lm-eval's gsm8k, hendrycks_math500 and aime, docs/lm_eval.md
longmemeval chains -> facts, ruler or rows of your own, CONTRIBUTING.md
context_marker -> retain compare with question=[unknown], on a file or hub data set
ruler_like -> facts, or RULER as published: hub:simonjegou/ruler
longbench_e -> longbench, or lm-eval's longbench_e
reference_probes -> reference/multikey, which python -m retain.eval.head_weights asks
reference/quote reference/format -> reference/lists, the held-out family
reference_shift -> tasks=[facts] with a text of your own
multi_turn -> rows that share a context_id
thinking -> nothing in its place: thoughts are switched off, and what is thought is not scored
contains exact_match -> match_any, which ignores case
qa_f1_keep_articles -> qa_f1
single_key -> nothing in its place: no claim rests on it any more
"""
REMOVED: Mapping[str, str] = {
    name: now
    for names, _, now in (row.partition(" -> ") for row in re.sub(r"\n +", " ", TABLE).splitlines())
    for name in names.split()
}


def hint_of(name: str) -> str:
    """For an error: what to use in the place of a name that went; empty where it never was.

    Examples:
        >>> hint_of("allocation.quotas")
        ' (removed; now: scope: model, where heads share a budget by score; CHANGELOG.md)'
        >>> hint_of("keep_ratio")
        ''
    """
    if (
        name not in REMOVED and "/" in name and (group := name.partition("/")[0]) in REMOVED
    ):  # a task, infinitebench/passkey
        name = group
    parts = name.replace(":", ".").split(".")
    for first in range(len(parts)):
        if (now := REMOVED.get(".".join(parts[first:]))) is not None:
            return f" (removed; now: {now}; CHANGELOG.md)"
    return ""
