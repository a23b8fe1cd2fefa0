"""Tasks in plain text, for any model that has a tokenizer: cards in, items in token ids out.

A task is a card (`cards/<group>/<task>.yaml`: what is asked, source, licence, version, scorer) and a
generator, a function that writes the text of one item: a context, questions on it, right answers. This file
turns text into tokens as the model wants it, with the tokenizer's chat template or without, and generated
tokens back into text that a scorer of `retain.eval.metrics` reads.

The one decision taken here: the seam between context and question is cut in text, before tokens are made, so
that no token spans it; what stands before the seam is the same whatever is asked behind it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from retain.config import load
from retain.eval.metrics import METRICS, first_line
from retain.eval.tasks import Asked, Document, Item, Provenance, Suite, Task
from retain.hf.named import load_named, load_named_tokenizer
from retain.registry import lookup

CARDS = Path(__file__).parent / "cards"
# Stands for the seam while a chat template is rendered: no template and no task contains it.
SEAM = "\u2063retain\u2063seam\u2063"

# Settings that say where a task's data lie, and nothing of what it is.
WHERE = frozenset({"path", "revision"})


@dataclass(frozen=True)
class TextQuestion:
    """One question on a context.

    Attributes:
        question: What is asked, with all that stands between the context and the model's answer.
        references: Right answers; the scorer says what several mean.
        answer_prefix: Beginning of the model's own answer, behind a chat template's last header.
        about: What a table may be split by.
        scoring: What the scorer needs besides (`all_classes` of a classification).
        answer: A right answer in full, where it is not the first reference alone.
    """

    question: str
    references: tuple[str, ...]
    answer_prefix: str = ""
    about: Mapping[str, str | float] = field(default_factory=dict)
    scoring: Mapping[str, Any] = field(default_factory=dict)
    answer: str = ""


@dataclass(frozen=True)
class TextItem:
    """One context and what is asked of it.

    Attributes:
        context: Read, and evicted from, before any question is (in the regime `context_only`).
        questions: At least one.
        turns: Whether each question follows on the questions before it and their right answers (a
            conversation), or every one on the context alone (requests).
        needles: Spans `[start, stop)` of characters of the context that hold what is asked.
        about: What a table may be split by.
    """

    context: str
    questions: tuple[TextQuestion, ...]
    turns: bool = False
    needles: tuple[tuple[int, int], ...] = ()
    about: Mapping[str, str | float] = field(default_factory=dict)


@dataclass(frozen=True)
class Asking:
    """Which item a generator is to write.

    Attributes:
        seed: Of the run.
        index: Of the item.
        context_tokens: Most tokens of its context.
        measure: How many tokens a text has, to the model that will read it.
        tokenizer: Of that model, where a task is defined by its tokens (truncation in the middle).
    """

    seed: int
    index: int
    context_tokens: int
    measure: Callable[[str], int]
    tokenizer: Any = None


@runtime_checkable
class Generator(Protocol):
    """Writes the text of one item; a card's `settings` are its keyword arguments."""

    def __call__(self, asking: Asking, **settings: Any) -> TextItem:
        """The item, the same for the same asking."""


@dataclass(frozen=True)
class Card:
    """What a task is: `cards/<group>/<task>.yaml`.

    Attributes:
        about: What is asked, in one line.
        generator: Name in `GENERATORS`.
        metric: Name in `retain.eval.metrics.METRICS`.
        max_new_tokens: Most tokens of an answer.
        source: Where data and definition come from: a paper, a repository, a data set.
        licence: Of the data.
        provenance: "official" data, prompts and scorer; "official data", but prompts or scorer of our own;
            "ruler-like": RULER's task on another haystack; "synthetic": generated, under a name of its own.
        version: Raised whenever an item or a score would change.
        settings: Of the generator.
        chat: Whether a chat template is used, where the tokenizer has one.
        stop: Texts that end an answer; what follows is not scored.
        first_line: Whether only the first line of an answer is scored.
        single_key: Whether one fact of one key answers the question.
    """

    about: str
    generator: str
    metric: str
    max_new_tokens: int
    source: str
    licence: str
    provenance: Provenance
    version: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    chat: bool = True
    stop: tuple[str, ...] = ()
    first_line: bool = False
    single_key: bool = False


@dataclass(frozen=True)
class TextSettings:
    """Whose tokens, and how its prompts are made.

    Attributes:
        model: `reference:<seed>` (or `reference:{seed}`: that of the run's seed), a local folder, or a hub
            name.
        tasks: Names of cards (`ruler/niah_single_1`), of groups of them (`ruler`), or none: all.
        chat: Whether a chat template is used where card and tokenizer have one.
        changes: Per task or group, settings of its generator that differ from the card's: `{longbench: {path:
            ...}}`; a task's own go before its group's. A task that is changed in more than where its data lie
            is no longer the card's, and its provenance is "changed".
        dtype: Of the model's weights, as torch calls it; "auto": as the checkpoint says.
        device: Where the model runs.
        revision: Of a hub model.
        trust_remote_code: Run code that comes with the checkpoint.
    """

    model: str = "reference:{seed}"
    tasks: tuple[str, ...] = ()
    chat: bool = True
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    dtype: str = "auto"
    device: str = "cpu"
    revision: str | None = None
    trust_remote_code: bool = False


@cache
def generators() -> Mapping[str, Generator]:
    """Every generator by name; each module of tasks lists its own."""
    from retain.eval.tasks import (
        chains,
        longbench,
        longbench_v2,
        longmemeval,
        mathematics,
        multi_turn,
        niah,
        ruler,
        ruler_counting,
        ruler_qa,
    )

    modules = (
        *(ruler, ruler_counting, ruler_qa, niah, multi_turn, chains),
        *(longbench, longbench_v2, longmemeval, mathematics),
    )
    return {name: made for module in modules for name, made in module.GENERATORS.items()}


@cache
def sizes() -> Mapping[str, Callable[..., int]]:
    """How many items the generators that read a data set have, by name: functions of a card's settings."""
    from retain.eval.tasks import longbench, longbench_v2, longmemeval, mathematics, ruler_qa

    modules = (longbench, longbench_v2, longmemeval, mathematics, ruler_qa)
    return {name: size for module in modules for name, size in module.SIZES.items()}


@cache
def cards() -> Mapping[str, Card]:
    """Every card, by `group/task`."""
    paths = sorted(CARDS.glob("*/*.yaml"))
    return {f"{path.parent.name}/{path.stem}": load(path, Card) for path in paths}


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """Names of tasks, groups resolved, in the order of the cards; none asked for: all.

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
    """A suite of tasks in text, for one model.

    Args:
        how: Fields of `TextSettings`.

    Raises:
        ValueError: unknown tasks, generators or metrics, or settings that do not fit.
    """
    settings = TextSettings(**how)
    names = chosen(settings.tasks)
    for name in settings.changes:
        lookup(name, dict.fromkeys((*names, *map(_group, names))), what="task or group")
    return Suite(
        name="text",
        tasks={name: _task(name, cards()[name], settings) for name in names},
        item=partial(text_item, _frozen(settings)),
        documents=_no_documents,
        load_model=partial(_load, _frozen(settings)),
        seeds=_seeds(settings.model),
        train_gates="accelerate launch train/distill.py --config configs/distill/hub.yaml "
        f"model={settings.model} seed={{seed}} output={{gates}}",
    )


def text_item(settings: "_Frozen", task: str, seed: int, index: int, context_tokens: int) -> Item:
    """Item `index` of a task, in tokens of the model."""
    given = settings.settings
    card = cards()[task]
    tokenizer = _tokenizer(given.model.replace("{seed}", str(seed)), given.revision, given.trust_remote_code)
    asking = Asking(seed, index, context_tokens, partial(_count, tokenizer), tokenizer)
    made = lookup(card.generator, generators(), what="generator")
    written = made(asking, **{**card.settings, **_changes(given, task)})
    return render(written, card, tokenizer, chat=given.chat and card.chat)


def render(written: TextItem, card: Card, tokenizer: Any, *, chat: bool) -> Item:
    """An item of text in the tokens of a model.

    With a chat template, context and question are one message of the user, cut where the question begins;
    the template's header of the answer and `answer_prefix` follow the question. Without one, the tokenizer's
    own first token precedes the context.

    Args:
        written: The text.
        card: How it is answered and scored.
        tokenizer: Of the model.
        chat: Whether a chat template is used, if the tokenizer has one.
    """
    templated = chat and getattr(tokenizer, "chat_template", None) is not None
    before, after = _frame(tokenizer) if templated else ("", "")
    opening = before + written.context
    context_ids = _encode(tokenizer, opening, special=not templated)
    end_ids = _end_ids(tokenizer)
    asked, said = [], ""
    for turn, question in enumerate(written.questions):
        text = said + question.question + after + question.answer_prefix
        gold = question.answer or next(iter(question.references), "")
        gold_ids = _encode(tokenizer, gold if text[-1:].isspace() else f" {gold}", special=False)
        about = {**question.about} | ({"turn": float(turn)} if len(written.questions) > 1 else {})
        asked.append(
            Asked(
                question_ids=_at_least_two(_encode(tokenizer, text, special=False), tokenizer),
                gold_ids=(*gold_ids, *end_ids[:1]),
                generate=card.max_new_tokens,
                score=partial(_score, tokenizer, card, question),
                text=partial(_said, tokenizer, card),
                references=question.references,
                about=about,
            )
        )
        if written.turns:
            said = f"{text} {gold}\n\n"
    return Item(
        context_ids=context_ids,
        asked=tuple(asked),
        end_ids=end_ids,
        needles=_token_spans(tokenizer, opening, len(before), written.needles, special=not templated),
        about={**written.about, "context_tokens": float(len(context_ids))},
    )


@dataclass(frozen=True)
class _Frozen:
    """Settings that a process can be sent, and a cache be keyed by."""

    settings: TextSettings

    def __hash__(self) -> int:
        return hash(self.settings.model)


def _frozen(settings: TextSettings) -> _Frozen:
    return _Frozen(settings)


def _group(name: str) -> str:
    return name.partition("/")[0]


def _changes(settings: TextSettings, task: str) -> dict[str, Any]:
    return {**settings.changes.get(_group(task), {}), **settings.changes.get(task, {})}


def _task(name: str, card: Card, settings: TextSettings) -> Task:
    lookup(card.metric, METRICS, what="metric")
    lookup(card.generator, generators(), what="generator")
    changed = _changes(settings, name)
    size = sizes().get(card.generator)
    return Task(
        name=name,
        family="held-out",
        about=card.about,
        single_key=card.single_key,
        primary="partial",
        metric=card.metric,
        provenance="changed" if changed.keys() - WHERE else card.provenance,
        source=card.source,
        licence=card.licence,
        version=card.version,
        num_items=None if size is None else size(**{**card.settings, **changed}),
    )


def _load(settings: _Frozen, seed: int) -> Any:
    given = settings.settings
    model, _ = load_named(
        given.model.replace("{seed}", str(seed)),
        dtype=given.dtype,
        revision=given.revision,
        trust_remote_code=given.trust_remote_code,
    )
    return model.to(given.device)


def _no_documents(seed: int, count: int, context_tokens: int) -> Iterator[Document]:
    raise ValueError(
        "tasks in text have no documents that gates were trained on, which the token-identity control and "
        "head classes are fitted on: leave those policies out."
    )


def _seeds(model: str) -> tuple[int, ...] | None:
    if "{seed}" not in model:
        return None
    from retain.reference import SEEDS

    return tuple(SEEDS)


@cache
def _tokenizer(name: str, revision: str | None, trust_remote_code: bool) -> Any:
    tokenizer = load_named_tokenizer(name, revision=revision, trust_remote_code=trust_remote_code)
    if tokenizer is None:
        raise ValueError(f"model={name!r} has no tokenizer, and tasks in text need one.")
    return tokenizer


def _count(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _encode(tokenizer: Any, text: str, *, special: bool) -> tuple[int, ...]:
    ids = tuple(tokenizer(text, add_special_tokens=special)["input_ids"])
    bos = tokenizer.bos_token_id
    # Not every tokenizer puts its first token where it belongs by itself.
    if special and bos is not None and ids[:1] != (bos,):
        return (bos, *ids)
    return ids


def _at_least_two(ids: tuple[int, ...], tokenizer: Any) -> tuple[int, ...]:
    """A question has two tokens or more, since in `query_aware` its last one is read again."""
    while len(ids) < 2:
        ids = (*_encode(tokenizer, "\n", special=False), *ids)
    return ids


def _frame(tokenizer: Any) -> tuple[str, str]:
    """What a chat template puts before a message of the user, and between it and the answer."""
    message = {"role": "user", "content": SEAM}
    rendered = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    before, _, after = rendered.partition(SEAM)
    return before, after


def _end_ids(tokenizer: Any) -> tuple[int, ...]:
    """The end of a text, and of a turn where the tokenizer knows one."""
    ends = [tokenizer.eos_token_id]
    for name in ("<|im_end|>", "<|end|>", "<|eot_id|>", "<end_of_turn>", "<|endoftext|>"):
        if name in tokenizer.get_vocab():
            ends.append(tokenizer.convert_tokens_to_ids(name))
    return tuple(dict.fromkeys(end for end in ends if end is not None))


def _said(tokenizer: Any, card: Card, generated: Sequence[int]) -> str:
    """Generated tokens as text, up to what ends the answer."""
    ends = {*_end_ids(tokenizer)}
    stop = next((place for place, token in enumerate(generated) if token in ends), len(generated))
    text = tokenizer.decode(list(generated[:stop]), skip_special_tokens=True)
    if card.first_line:
        text = first_line(text)
    for end in card.stop:
        text = text.partition(end)[0]
    return text


def _score(
    tokenizer: Any, card: Card, question: TextQuestion, generated: Sequence[int]
) -> tuple[float, float]:
    found = METRICS[card.metric](_said(tokenizer, card, generated), question.references, **question.scoring)
    return float(found >= 1.0), float(found)


def _token_spans(
    tokenizer: Any, text: str, shift: int, spans: Sequence[tuple[int, int]], *, special: bool
) -> tuple[tuple[int, int], ...]:
    """Spans of characters as spans of tokens: every token that holds a character of them."""
    if not spans:
        return ()
    encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
    offsets = encoded["offset_mapping"]
    own = len(_encode(tokenizer, text, special=special)) - len(offsets)
    found = []
    for start, stop in spans:
        held = [
            place
            for place, (first, last) in enumerate(offsets)
            if first < stop + shift and last > start + shift and last > first
        ]
        if held:
            found.append((held[0] + own, held[-1] + 1 + own))
    return tuple(found)
