"""Says what goes with what: one table for all methods, and one function that refuses.

A method declares as class data what it reads (`ScoreFamily.needs`; `Gate.inputs`, `contextual`, `ages`), and
a row of `TABLE` says the uses that it refuses. So a new score or gate needs no row. Padded
batches have none: every method takes them.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from retain.budget.statement import Budget
from retain.gates import GateSet
from retain.policy import check_budget
from retain.presets import Policy

Use = Literal["chunks", "again", "bytes", "bits", "merge", "unknown_rope", "vllm"]
USES: dict[Use, str] = {
    "chunks": "a prompt that is read in chunks",
    "again": "evictions later again",
    "bytes": "a budget in bytes",
    "bits": "entries held in fewer bits",
    "merge": "merging",
    "unknown_rope": "a model whose rotary embedding is not understood",
    "vllm": "vLLM's engine",
}

BEFORE_ROPE = frozenset({"queries_before", "keys_before"})


@dataclass(frozen=True)
class Method:
    """A part of a policy, as the table looks at it.

    Args:
        kind: which rows are about it.
        name: for messages.
        reads: evidence that a score needs, or inputs of gates.
        contextual: True where its score of an entry depends on other entries.
    """

    kind: Literal["score", "gates", "scorer", "merge", "bits"]
    name: str
    reads: frozenset[str] = frozenset()
    contextual: bool = False


@dataclass(frozen=True)
class Row:
    """Uses that methods of a kind refuse.

    Args:
        kind: of the methods.
        uses: each of them is refused.
        why: the reason, and what to take instead.
        those: which methods of the kind; None: all.
        along: refused only along with this one; None: in any case.
    """

    kind: str
    uses: tuple[Use, ...]
    why: str
    those: Callable[[Method], bool] | None = None
    along: Use | None = None


TABLE = (
    Row(
        "gates",
        ("again", "chunks"),
        "their score of an entry depends on other entries, of which earlier ones may be evicted then: read "
        "the prompt at once under when='prefill', or take gates that score each entry by itself",
        lambda gates: gates.contextual,
    ),
    Row(
        "gates",
        ("unknown_rope",),
        "they look at queries or keys before RoPE: take gates that look at something else",
        lambda gates: bool(gates.reads & BEFORE_ROPE),
    ),
    Row(
        "scorer",
        ("again", "chunks"),
        "it reads the attention input of all entries, which is not kept: read the prompt at once under "
        "when='prefill', or take a policy that ships",
    ),
    Row(
        "merge",
        ("again", "chunks"),
        "entries that are held in fewer bits cannot be merged into any more: read the prompt at once under "
        "when='prefill', or leave correction or precision out",
        along="bits",
    ),
    Row(
        "bits",
        ("again",),
        "entries that share scales are packed once, and none of them is evicted then: take when='prefill', "
        "or precision None",
    ),
    Row(
        "score",
        ("vllm",),
        "it reads the queries of all tokens, and the engine keeps those of the last ones: take 'snapkv' or "
        "'tova'",
        lambda score: bool(score.reads & {"queries", "running"}),
    ),
    Row(
        "score",
        ("unknown_rope",),
        "it turns queries back to before RoPE: take a score that needs none, such as 'snapkv'",
        lambda score: "rotary" in score.reads,
    ),
    Row("merge", ("vllm",), "packing does not change values yet: set correction=null"),
    Row("bits", ("vllm",), "the engine holds entries in its own types: set precision=null"),
    Row(
        "gates",
        ("vllm",),
        "the engine shows hidden states alone, of the tokens of a chunk: take 'linear', 'mlp', 'lowrank' or "
        "'decay'",
        lambda gates: gates.contextual or gates.reads != {"hidden"},
    ),
)


def methods_of(policy: Policy, gates: GateSet | None = None, scorer: Any = None) -> Iterator[Method]:
    """The methods that a policy is made of.

    Args:
        gates: of a learned policy; None: not loaded yet.
        scorer: a function that stands in for the policy's observed score.
    """
    if scorer is not None:
        yield Method("scorer", "a scorer of your own")
    elif policy.observed is not None:
        yield Method("score", f"score {policy.observed!r}", policy.needs)
    if policy.learned and gates is not None:
        yield Method("gates", f"gates of family {gates.family!r}", gates.inputs, gates.contextual)
    if policy.correction is not None:
        yield Method("merge", "its correction")
    if policy.precision is not None:
        yield Method("bits", "its precision")


def problems(
    policy: Policy, uses: Collection[Use], *, gates: GateSet | None = None, scorer: Any = None
) -> list[str]:
    """List the wanted uses that do not go with a policy.

    Args:
        uses: besides those that the policy's settings say (`bits`, `merge`).
        gates, scorer: as in `methods_of`.
    """
    methods = [*methods_of(policy, gates, scorer)]
    wanted = {*uses, *(method.kind for method in methods)}
    return [
        f"{method.name} and {USES[use]}{f' with {USES[row.along]}' if row.along else ''}: {row.why}"
        for method in methods
        for row in TABLE
        if row.kind == method.kind and (row.those is None or row.those(method))
        for use in row.uses
        if use in wanted and (row.along is None or row.along in wanted)
    ]


def refuse(
    policy: Policy, uses: Collection[Use], *, gates: GateSet | None = None, scorer: Any = None
) -> None:
    """Refuse what does not go together.

    Raises:
        ValueError: with all problems.
    """
    if found := problems(policy, uses, gates=gates, scorer=scorer):
        raise ValueError(f"policy {policy.name!r} cannot: {'; '.join(found)}.")


def check_gates(policy: Policy, budget: Budget, gates: GateSet, *, scored_elsewhere: bool = False) -> None:
    """Refuse gates that a policy cannot use.

    Args:
        policy: a learned one.
        budget: as stated.
        gates: that it was given.
        scored_elsewhere: whether a function stands in for the policy's own observed score.

    Raises:
        ValueError: the gates know nothing of entries that the policy may evict; a fusion of unlike units,
            or numbers wanted of a gate of which only the order means something.
    """
    window = gates.metadata.get("protected_window") or 0
    if window > policy.protection.recent:
        raise ValueError(
            f"policy {policy.name!r} protects the last {policy.protection.recent} entries, and its gates "
            f"were trained for a protected window of {window}: of nearer entries they know nothing. Wanted: "
            f"protection.recent of at least {window}. Set protection.recent={window}, or train gates with a "
            f"smaller target.horizon (at most {policy.protection.recent})."
        )
    unit, problems = gates.unit, []
    how = policy.fusion_of(policy.observed is not None or scored_elsewhere, True)
    alike = how in ("max", "sum") and policy.observed is not None and not scored_elsewhere
    wanted = policy.unit if alike else unit
    if unit != wanted:
        problems.append(
            f"fusion {how!r} wants a gate in {wanted!r}, and these gates are in {unit!r}: calibrate them to "
            "risk (train/distill.py, calibration.kind shared), or take fusion 'rank_blend' or "
            "'learned', which take any unit"
        )
    made = "rank" if how == "rank_blend" else wanted
    if made == "rank" and policy.layers == "entropy" and how != "observed":
        problems.append(
            "allocation.layers 'entropy' wants numbers, and the score is in 'rank', of which only the order "
            "means something: calibrate the gates to risk, or leave it out"
        )
    if problems:
        raise ValueError(f"policy {policy.name!r} does not go with these gates: {'; '.join(problems)}.")
    if how not in ("observed", "learned"):
        check_budget(policy, budget, made)
