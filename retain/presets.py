"""Defines `Policy`, and loads the presets that ship with the project.

A policy is one of three dataclasses, by its scope; `retain/policy.py` reads it. A setting lives in the object
that reads it, so that one that nothing would read cannot be stated; what is wrong is found when a policy is
made, all at once.
"""

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag
from pydantic.dataclasses import dataclass

from retain import config
from retain.budget.largest_remainder import exact
from retain.cache.precision import Precision
from retain.config import STRICT, Share
from retain.correction.merge import METADATA_BYTES, Merge
from retain.process.registry import lookup
from retain.protection import Protection
from retain.scores import SCORES, ScoreFamily
from retain.shapes import LayerShape

Evaluated = Literal["any", "question unknown", "question known", "chunk", "decode", "prefill+decode"]
Scope = Literal["head", "layer", "model"]
Fusion = Literal["max", "sum", "observed", "learned", "rank_blend"]


@dataclass(frozen=True, config=STRICT)
class FirstStage:
    """Size of a first stage.

    Args:
        by: `budget`: a share of each head's budget (CriticalKV's alpha). `mass`: the entries that hold a
            share of all observed attention (DefensiveKV as its text has it).
        share: of the budget, or of the mass, in [0, 1].
    """

    by: Literal["budget", "mass"] = "budget"
    share: Share = 0.5


@dataclass(frozen=True, config=STRICT)
class Draw:
    """How much of a budget is drawn.

    Args:
        share: of the shared budget apart from the guaranteed entries, in [0, 1]; the rest goes by score. A
            part of an entry goes by score.
    """

    share: Share = 0.2


@dataclass(frozen=True, config=STRICT)
class Uniform:
    """Every layer gets the same."""

    layers: Literal["uniform"] = "uniform"


@dataclass(frozen=True, config=STRICT)
class Pyramid:
    """Shares of layers fall linearly with depth (PyramidKV); the last layer gets `1 / beta` of the mean."""

    layers: Literal["pyramid"]
    beta: Annotated[float, Field(ge=1)] = 20.0

    def line(self, mean: Fraction, most: Fraction, num_layers: int) -> list[Fraction]:
        """Shares of layers: a straight line over depth, of this mean.

        `first = 2 mean - last`, `last = mean / beta`; if the first would exceed what exists, `first = most`
        and `last = 2 mean - most`. Beta 20 as its code and comparisons have it. Theirs rounds each step down,
        and computes the line once for the first prompt; here it is exact, and each prompt's own.
        """
        if num_layers == 1:
            return [mean]
        last = mean / exact(self.beta)
        first = 2 * mean - last
        if first > most:
            first, last = most, 2 * mean - most
        return [first - (first - last) * idx / (num_layers - 1) for idx in range(num_layers)]


@dataclass(frozen=True, config=STRICT)
class ByScore:
    """Shares of layers go by a weight that the score gives: `cake`, CAKE's preference; `entropy`, the entropy
    of the scores that compete (LAVa)."""

    layers: Literal["cake", "entropy"]


@dataclass(frozen=True, config=STRICT)
class ByHead:
    """The heads of all layers share what is not protected in proportion to a number for each, of a file
    (`retain.attention.head_weights`; DuoAttention, HeadKV)."""

    layers: Literal["by_head"]
    weights: str


@dataclass(frozen=True, config=STRICT)
class Guard:
    """How heads share a budget.

    Args:
        safeguard: `guaranteed`: each head keeps its first entries beside the protected ones,
            `safeguard_share` of the mean budget; None: one entry a head.
        safeguard_share: in [0, 1].
        compete_by: heads compete by their `score`, or by the score of their `first` stage (AdaKV under
            CriticalKV).
    """

    safeguard: Literal["guaranteed"] | None = None
    safeguard_share: Share = 0.2
    compete_by: Literal["score", "first"] = "score"


@dataclass(frozen=True, config=STRICT)
class SharedUniform(Guard, Uniform):
    """Every layer gets the same, and its heads share it."""


@dataclass(frozen=True, config=STRICT)
class SharedPyramid(Guard, Pyramid):
    """Shares of layers fall with depth, and the heads of a layer share its own."""


@dataclass(frozen=True, config=STRICT)
class SharedByScore(Guard, ByScore):
    """Shares of layers go by their scores, and the heads of a layer share its own."""


def _with_layers(stated: Any) -> Any:
    """An allocation with the rule by which its kind is told: as stated, of a file, or uniform."""
    rule = "by_head" if isinstance(stated, dict) and {*stated} == {"weights"} else "uniform"
    return {"layers": rule, **stated} if isinstance(stated, dict) else stated


ByRule = Field(discriminator="layers"), BeforeValidator(_with_layers)
HeadAllocation = Annotated[Uniform | Pyramid | ByScore | ByHead, *ByRule]
LayerAllocation = Annotated[SharedUniform | SharedPyramid | SharedByScore, *ByRule]


def _known_score(name: str) -> str:
    lookup(name, SCORES, what="score")
    return name


@dataclass(frozen=True, config=STRICT)
class Policy:
    """Settings of all stages that decide which entries stay. Without any score, everything stays.

    Made as a `HeadPolicy`, a `LayerPolicy` or a `ModelPolicy`, which say how heads split a budget; a
    `Policy(...)` itself is a TypeError.

    Args:
        scope: `head` gives each head the same budget, `layer` lets the heads of a layer share by score,
            `model` the heads of all layers.
        allocation: how a budget is spread over layers and heads.
        first_stage: entries that are kept before the score ranks the rest; None for one stage.
        draw: share of a budget that heads share which is drawn by lot, in proportion to what was observed
            (`retain.budget.joint`); None: all of it goes by score.
        name: how it is called in reports.
        observed: score over queries already seen, a name in `retain.scores.SCORES`; None for none.
        observed_settings: settings of that score.
        learned: whether it takes a gate's score.
        fusion: how the two become one; None is `max` with both, and the one that there is with one.
        fusion_weight: of the learned side, for `rank_blend`, in 0..1.
        protection: entries that are never evicted.
        correction: how what stays makes up for what goes (`retain.correction`); None: it does not.
        precision: in how many bits what stays is held (`retain.cache.precision`); None: as it was.
        evaluated: the setting of its paper: an eviction behind a prompt whose question comes later
            (`question unknown`) or is in it (`question known`), or when it evicts else; or `any`.
        paper: where it comes from.
        variants: variants of the policy: name -> the `key=value` changes that make it. `paper` and
            `code`, the paper's score and the released code's, are both under the common protection and exact
            budget, for comparisons at equal memory.
    """

    scope: Scope = field(default="head", kw_only=True)
    allocation: Uniform | Pyramid | ByScore | ByHead = field(default=Uniform(), kw_only=True)
    first_stage: FirstStage | None = field(default=None, kw_only=True)
    draw: Draw | None = field(default=None, kw_only=True)
    name: str
    observed: Annotated[str, AfterValidator(_known_score)] | None = None
    observed_settings: dict[str, Any] = field(default_factory=dict)
    learned: bool = False
    fusion: Fusion | None = None
    fusion_weight: Share = 0.5
    protection: Protection = Protection()
    correction: Merge | None = None
    precision: Precision | None = None
    evaluated: Evaluated = "any"
    paper: str = ""
    variants: dict[str, tuple[str, ...]] = field(default_factory=dict)
    KINDS: ClassVar[Any]

    def __new__(cls, *arguments: Any, **settings: Any) -> "Policy":
        if cls is Policy:
            raise TypeError("a Policy is made as HeadPolicy, LayerPolicy or ModelPolicy (retain.presets).")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        score, problems = self.score_family, []
        if score is not None:
            problems += score.problems(self.observed_settings)
        elif self.observed_settings:
            problems.append(f"observed_settings {self.observed_settings} belong to no score: name observed")
        problems += [said for wrong, said in self._rules(score) if wrong]
        if problems:
            raise ValueError(f"policy {self.name!r}: {'; '.join(problems)}.")

    def _rules(self, score: ScoreFamily | None) -> Iterator[tuple[bool, str]]:
        """Rules, each with whether it is broken: settings of which one would make another one empty, or that
        need what the observed score (None without) does not give."""
        stage, first = self.first_stage, self.guard.compete_by == "first"
        by_value = {
            "fusion 'sum'": self.fusion == "sum",
            "draw": self.draw is not None,
            "allocation.layers 'entropy'": self.layers == "entropy" and not self.learned,
        }
        wanting = [name for name, asked in by_value.items() if asked]
        alone = None if self.learned else score
        yield (
            self.draw is not None and (stage is not None or first),
            "draw stands beside one stage by score: take first_stage null, allocation.compete_by 'score'",
        )
        yield (
            stage is not None and stage.by == "mass" and isinstance(self.allocation, Pyramid | ByHead),
            "a first stage by mass may take a head's whole mean budget, and layers by pyramid and "
            "allocation.weights may give it less: take first_stage by 'budget'",
        )
        yield (
            score is not None and score.unit == "rank" and bool(wanting),
            f"{', '.join(wanting)} wants numbers, and {self.observed!r} is in 'rank', of which only the "
            "order means something: take an observed score in 'risk' or 'mass'",
        )
        yield (
            alone is not None and not alone.two_stages and (stage is not None or first),
            "first_stage and allocation.compete_by 'first' want a score of two stages, and "
            f"{self.observed!r} has one: take observed 'critical' or 'defensive'",
        )
        yield (
            alone is not None and not alone.weighs_layers and self.layers == "cake",
            f"allocation.layers 'cake' wants CAKE's preference, and {self.observed!r} measures none: "
            "take observed 'cake', or allocation.layers 'entropy'",
        )

    @property
    def guard(self) -> Guard:
        """How heads share."""
        return self.allocation if isinstance(self.allocation, Guard) else Guard()

    @property
    def layers(self) -> str:
        """The rule by which layers get their shares."""
        return "uniform" if isinstance(self.allocation, ByHead) else self.allocation.layers

    @property
    def weights(self) -> str | None:
        """File of the weights of heads; None without."""
        return self.allocation.weights if isinstance(self.allocation, ByHead) else None

    @property
    def drawn_share(self) -> float | None:
        """Share of a shared budget that is drawn; None: nothing."""
        return None if self.draw is None else self.draw.share

    @property
    def crosses_layers(self) -> bool:
        """True where the keep set of a layer depends on other layers."""
        return self.scope == "model" or isinstance(self.allocation, ByScore)

    @property
    def two_stages(self) -> bool:
        """True where a head's first stage depends on its budget."""
        return self.first_stage is not None and self.first_stage.by == "budget"

    @property
    def score_family(self) -> ScoreFamily | None:
        """Declaration of its observed score, under its settings; None without one."""
        return SCORES[self.observed].under(self.observed_settings) if self.observed else None

    @property
    def window(self) -> int:
        """Last queries that its score observes; 0 without one."""
        score = self.score_family
        return score.window(self.observed_settings) if score else 0

    @property
    def needs(self) -> frozenset[str]:
        """Fields that scores read beyond keys and values: `window`, `running`, `seeds`, `gates`, `weights` of
        heads (`retain.attention.head_weights`), ..."""
        fields = frozenset(self.score_family.needs if self.score_family else ())
        fields |= {"gates"} if self.learned else frozenset()
        return fields | ({"weights"} if self.weights is not None else frozenset())

    @property
    def gate_alone(self) -> bool:
        """True where the gate's score alone decides, in the gate's unit."""
        return self.learned and self.fusion_of(self.observed is not None, True) == "learned"

    def fusion_of(self, observed: bool, learned: bool) -> str:
        """The fusion: as stated; by default the maximum of two scores, or the only one that there is."""
        return self.fusion or ("max" if observed and learned else "observed" if observed else "learned")

    @property
    def keeps_all(self) -> bool:
        """True where there is no score."""
        return self.observed is None and not self.learned

    def shape_held(self, shape: LayerShape) -> LayerShape:
        """A layer's shape, with what the policy holds beside entries, and in how many bytes it holds them."""
        shape = replace(shape, metadata_bytes=self.metadata_bytes)
        if self.precision is None:
            return shape
        each = shape.entry_bytes // (2 * shape.element_size)
        widths = shape.widths or (each, each)
        packed, head = self.precision.cost(*widths, shape.element_size)
        return replace(shape, packed_bytes=packed, head_bytes=head)

    @property
    def metadata_bytes(self) -> int:
        """Bytes that attention reads beside each entry that is left."""
        return 0 if self.correction is None else METADATA_BYTES

    @property
    def unit(self) -> str:
        """Unit of its score, as far as it is known before any layer is scored."""
        if self.fusion == "rank_blend":
            return "rank"
        score = self.score_family
        return score.unit if score else "risk" if self.learned else "rank"


@dataclass(frozen=True, config=STRICT, kw_only=True)
class HeadPolicy(Policy):
    """Each head gets the same, or what its layer's share or its own number says."""

    scope: Literal["head"] = "head"
    allocation: HeadAllocation = Uniform()
    draw: None = None


@dataclass(frozen=True, config=STRICT, kw_only=True)
class LayerPolicy(Policy):
    """The heads of a layer share one budget by score."""

    scope: Literal["layer"] = "layer"
    allocation: LayerAllocation = SharedUniform()


@dataclass(frozen=True, config=STRICT, kw_only=True)
class ModelPolicy(Policy):
    """The heads of all layers share one budget by score."""

    scope: Literal["model"] = "model"
    allocation: SharedUniform = SharedUniform()


def scope(stated: dict[str, Any]) -> Any:
    """Tells policies apart."""
    return stated.get("scope", "head")


Policy.KINDS = Annotated[
    Annotated[HeadPolicy, Tag("head")]
    | Annotated[LayerPolicy, Tag("layer")]
    | Annotated[ModelPolicy, Tag("model")],
    Discriminator(scope),
]


LEGEND = """
unit: of its score; risk: attention times the norm of the projected value; mass: attention; rank: an order
scope: which heads share a budget by score; head: each has the same, layer: those of a layer, model: all
layers: what layers get; uniform: the same, else by the named rule
evaluated: the setting of its paper; a cache takes any other with it, or refuses it by name
needs: beyond keys and values; gates are trained, or load by folder or hub id; weights of heads are measured
Paper, variants (`name:variant`): retain.policies()[0].paper, .variants; docs/methods.md"""


class Presets(tuple[Policy, ...]):
    """Presets, whose `str` is a table with a legend."""

    def __str__(self) -> str:
        rows = [("name", "unit", "scope", "layers", "evaluated", "needs")]
        for one in self:
            needs = ", ".join(sorted(one.needs)) or "nothing"
            rows.append((one.name, one.unit, one.scope, one.layers, one.evaluated, needs))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows) + f"\n{LEGEND}"


def policies() -> Presets:
    """Every preset, by name; `print` shows them as a table.

    Examples:
        >>> from retain.presets import policies
        >>> [preset.name for preset in policies() if "gates" in preset.needs]
        ['gate', 'learned', 'merge']
    """
    return Presets(load_policy(name) for name in sorted(_preset_files()))


# Old name of a preset -> its name. Old names are read for one release, with a warning.
RENAMED = {"fused": "learned"}


def load_policy(name_or_path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Policy:
    """A policy by its preset name or from a YAML file.

    Args:
        name_or_path: a preset (`learned`), a preset's variant (`snapkv:paper`), or a path that ends in
            `.yaml`.
        overrides: `key.sub=value`, read as YAML; applied last.

    Raises:
        ValueError: unknown preset or variant, or everything that is wrong in the file, at once.
        FileNotFoundError: no such file.

    Examples:
        >>> from retain.presets import load_policy
        >>> load_policy("snapkv", ["protection.recent=16"]).protection.recent
        16
        >>> load_policy("snapkv:paper").observed_settings["pool"]
        'max'
    """
    text = str(name_or_path)
    if text.endswith((".yaml", ".yml")):
        return config.load(name_or_path, Policy, overrides)
    name, _, variant = text.partition(":")
    if name in RENAMED:
        message = (
            f"the preset {name!r} is called {RENAMED[name]!r}; the next release does not read the old name"
        )
        warnings.warn(message, FutureWarning, stacklevel=2)
        name = RENAMED[name]
    path = lookup(name, _preset_files(), what="policy")
    if variant:
        variants = {f"{name}:{key}": changes for key, changes in config.load(path, Policy).variants.items()}
        changes = lookup(text, variants, what="variant")
        overrides = [*changes, f"name={text}", "variants={}", *overrides]
    return config.load(path, Policy, overrides)


def _preset_files() -> dict[str, Path]:
    """Presets by name: beside this file in an installed package, in `configs/policy` of a checkout."""
    here = Path(__file__).parent
    folder = here / "policies" if (here / "policies").is_dir() else here.parent / "configs" / "policy"
    found = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    if not found:
        raise FileNotFoundError(f"the package's presets are not where they should be: no *.yaml in {folder}.")
    return found
