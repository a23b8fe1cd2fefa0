"""Tasks in plain text, for any model with a tokenizer: cards in, items in token ids out.

A task is a card (`cards/<group>/<task>.yaml`: question, source, licence, version, scorer) and a generator, a
function that writes the text of one item: a context, questions on it, right answers. Generators know neither
models nor tokens; `retain.eval.tasks.rendering` tokenizes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from retain.config import load
from retain.eval.metrics.scorers import METRICS
from retain.eval.tasks import facts, longbench, niah, ruler, ruler_counting, ruler_qa, scbench
from retain.eval.tasks.hub_rows import RowTask
from retain.eval.tasks.rendering import end_ids_of, render
from retain.eval.tasks.suite import Item, Suite, Task
from retain.eval.tasks.task_card import Asking, Card, Generator
from retain.models.named import load_named, load_named_tokenizer, located, reference_seed
from retain.reference.documents import Document
from retain.registry import lookup

MODULES = (ruler, ruler_counting, ruler_qa, niah, facts, longbench, scbench)
CARDS = Path(__file__).parent / "cards"

# The task of which probes are written, and what is added to the seed for them.
PROBED, PROBE_SEED = "niah/grid", 10**6

# Settings that say where a task's data lie, and nothing of what it is.
WHERE = frozenset({"path", "revision"})


@dataclass(frozen=True)
class TextSettings:
    """Tokenizer and prompt settings.

    Attributes:
        model: `reference:0`, a local folder, or a hub
            name.
        tasks: Names of cards (`ruler/niah_single_1`), of groups of them (`ruler`), or none: all.
        chat: Whether a chat template is used where card and tokenizer have one.
        template: More keyword arguments of the chat template.
        changes: Per task or group, settings of its generator that differ from the card's: `{longbench: {path:
            ...}}`; a task's own go before its group's. A task that is changed in more than where its data lie
            is no longer the card's, and its provenance is "changed".
        dtype: Of the model's weights, as torch calls it; "auto": as the checkpoint says.
        device: Where the model runs.
        revision: Of a hub model.
        trust_remote_code: Run code that comes with the checkpoint.
        device_map: How the model is spread over devices, as transformers takes it; `device` is not read then.
    """

    model: str = "reference:0"
    tasks: tuple[str, ...] = ()
    chat: bool = True
    template: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    dtype: str = "auto"
    device: str = "cpu"
    revision: str | None = None
    trust_remote_code: bool = False
    device_map: str | None = None


@cache
def generators() -> Mapping[str, Generator]:
    """List every generator by name, from the modules of tasks."""
    return {name: made for module in MODULES for name, made in module.GENERATORS.items()}


@cache
def sizes() -> Mapping[str, Callable[..., int]]:
    """Sizes of generators that read a data set, by name: functions of a card's settings."""
    of_rows = {name: made.size for name, made in generators().items() if isinstance(made, RowTask)}
    return {**of_rows, "ruler_qa": ruler_qa.ruler_qa_size}


@cache
def cards() -> Mapping[str, Card]:
    """Load every card, by `group/task`."""
    paths = sorted(CARDS.glob("*/*.yaml"))
    return {f"{path.parent.name}/{path.stem}": load(path, Card) for path in paths}


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """Resolve names of tasks and groups, in the order of the cards; without names: all.

    Raises:
        ValueError: a name that is neither.
    """
    known = cards()
    groups: dict[str, list[str]] = {}
    for name in known:
        groups.setdefault(_group(name), []).append(name)
    wanted: set[str] = set() if names else {*known}
    for name in names:
        wanted |= {*lookup(name, {**groups, **{task: [task] for task in known}}, what="task or group")}
    return tuple(name for name in known if name in wanted)


def text_suite(**how: Any) -> Suite:
    """A suite of tasks in text, for one model; `how` are fields of `TextSettings`.

    Raises:
        ValueError: Unknown tasks, generators or metrics, or settings that do not fit.
    """
    settings = TextSettings(**how)
    names = chosen(settings.tasks)
    for name in settings.changes:
        lookup(name, dict.fromkeys((*names, *map(_group, names))), what="task or group")
    return Suite(
        name="text",
        tasks={name: _task(name, cards()[name], settings) for name in names},
        item=partial(text_item, settings),
        documents=_no_documents,
        probes=partial(text_probes, settings),
        load_model=partial(_load, settings),
        seeds=None,
        train_gates="accelerate launch --quiet --config_file configs/accelerate/one_process.yaml "
        "train/distill.py --config configs/distill/hub.yaml "
        f"model={settings.model} seed={{seed}} output={{gates}}",
    )


def text_item(settings: TextSettings, task: str, seed: int, index: int, context_tokens: int) -> Item:
    """Write item `index` of a task, in tokens of the model."""
    card = cards()[task]
    checkpoint = _Checkpoint(settings.model, settings.revision, settings.trust_remote_code)
    tokenizer = _tokenizer(checkpoint)

    def measure(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    written = lookup(card.generator, generators(), what="generator")(
        Asking(seed, index, context_tokens, measure, tokenizer),
        **{**card.settings, **_changes(settings, task)},
    )
    item = render(
        written,
        card,
        tokenizer,
        chat=settings.chat and card.chat,
        end_ids=_ends(checkpoint),
        begin_ids=None if reference_seed(settings.model) is None else (tokenizer.bos_token_id,),
        options=settings.template,
    )
    longest = max(len(asked.question_ids) + asked.generate for asked in item.asked) + len(item.context_ids)
    window = _window(checkpoint)
    if window is not None and longest > window:
        raise ValueError(
            f"an item of {task} takes {longest} tokens with its question and answer, and "
            f"{settings.model} takes {window}: lower context_tokens by {longest - window} or more."
        )
    return item


def text_probes(settings: TextSettings, seed: int, count: int, context_tokens: int) -> Iterator[Item]:
    """Items of `niah/grid`, with a seed that no comparison asks for."""
    own = replace(settings, changes={})
    for index in range(count):
        yield text_item(own, PROBED, PROBE_SEED + seed, index, context_tokens)


def _group(name: str) -> str:
    return name.partition("/")[0]


def _changes(settings: TextSettings, task: str) -> dict[str, Any]:
    return {**settings.changes.get(_group(task), {}), **settings.changes.get(task, {})}


def _task(name: str, card: Card, settings: TextSettings) -> Task:
    lookup(card.metric, METRICS, what="metric")
    lookup(card.generator, generators(), what="generator")
    changed = _changes(settings, name)
    size = sizes().get(card.generator)
    like = card.provenance == "ruler-like"
    beyond = changed.keys() - WHERE - ({"haystack"} if like else set())
    provenance: str = "changed" if beyond or (card.chat and not settings.chat) else card.provenance
    if like:
        provenance += f" (haystack={changed.get('haystack', card.settings.get('haystack'))})"
    return Task(
        name=name,
        family="held-out",
        about=card.about,
        primary="partial",
        metric=card.metric,
        provenance=provenance,
        source=f"{card.source}; names and columns checked: {card.checked}",
        licence=card.licence,
        version=card.version,
        seeded=size is None,
        num_items=None if size is None else size(**{**card.settings, **changed}),
    )


# The last loaded model: a run needs it at its start and for its work.
_loaded: dict[tuple[Any, ...], Any] = {}


def _load(settings: TextSettings, seed: int) -> Any:
    names = ("dtype", "revision", "trust_remote_code", "device_map")
    how = {field: getattr(settings, field) for field in names}
    key = (settings.model, *how.values())
    if key not in _loaded:
        _loaded.clear()  # first: there may be no room for two
        _loaded[key] = load_named(settings.model, **how)[0]
    model = _loaded[key]
    return model if settings.device_map is not None else model.to(settings.device)


def _no_documents(seed: int, count: int, context_tokens: int) -> Iterator[Document]:
    raise ValueError(
        "tasks in text have no documents that gates were trained on, which the token-identity control and "
        "head classes are fitted on: leave those policies out."
    )


class _Checkpoint(NamedTuple):
    name: str
    revision: str | None
    trust_remote_code: bool


@cache
def _tokenizer(of: _Checkpoint) -> Any:
    tokenizer = load_named_tokenizer(of.name, revision=of.revision, trust_remote_code=of.trust_remote_code)
    if tokenizer is None:
        raise ValueError(f"model={of.name!r} has no tokenizer, and tasks in text need one.")
    return tokenizer


@cache
def _ends(of: _Checkpoint) -> tuple[int, ...]:
    """End tokens of a model's answer, from its tokenizer and its generation config."""
    if reference_seed(of.name) is not None:
        return end_ids_of(_tokenizer(of))
    from transformers import GenerationConfig

    stated: Any = None
    try:
        stated = GenerationConfig.from_pretrained(
            located(of.name), revision=of.revision or "main"
        ).eos_token_id
    except OSError as error:  # not every model has one
        if (Path(located(of.name)) / "generation_config.json").exists():
            raise ValueError(f"model={of.name!r}: its generation_config.json is damaged: {error}") from None
    return end_ids_of(_tokenizer(of), [stated] if isinstance(stated, int) else list(stated or ()))


@cache
def _window(of: _Checkpoint) -> int | None:
    """Context length of a model, if its config states one."""
    if reference_seed(of.name) is not None:
        return None
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            located(of.name), revision=of.revision or "main", trust_remote_code=of.trust_remote_code
        )
        return getattr(config.get_text_config(), "max_position_embeddings", None)
    except Exception as error:  # a damaged file leads transformers to errors of any class
        raise ValueError(f"model={of.name!r} has no config that can be read: {error}") from error
