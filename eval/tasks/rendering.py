"""Renders a task in text as tokens of a model, and decodes generated tokens for scoring.

With a chat template, context and question are one message of the user; the template's header of the answer,
and the beginning of the answer if the task gives one, follow the question. In a conversation every question
is a message of its own, behind the right answers to earlier ones.

The seam between context and question is cut in text, before tokenization, so that no token spans it; the
context's tokens do not depend on the question.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from retain.eval.metrics.scorers import METRICS, first_line
from retain.eval.tasks.suite import Asked, Item
from retain.eval.tasks.task_card import Card, TextItem, TextQuestion
from retain.hf.dated_template import dated_template

# Stand for the messages while a chat template is rendered: no template and no task contains them.
SEAMS = tuple(f"\u2063retain{number}\u2063" for number in range(3))
# Ends of a text or a turn that tokenizers know beside their `eos_token`.
ENDS = (
    *("<|im_end|>", "<|end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>"),
    *("<end_of_turn>", "</s>"),
)
THINK, THOUGHT = "<think>", "</think>"
# A share of an answer from which on all of it is right: some scorers' arithmetic stops short of 1.
ALL_RIGHT = 1.0 - 1e-6


@dataclass(frozen=True)
class Frame:
    """Text that a chat template writes around messages; empty without a template.

    Attributes:
        before: Before the user's first message.
        answering: Between a message of the user and an answer that is known.
        asking: Between that answer and the user's next message.
        after: Between the last message of the user and the answer that is to be generated.
    """

    before: str = ""
    answering: str = ""
    asking: str = "\n\n"
    after: str = ""


def frame_of(tokenizer: Any, *, options: Mapping[str, Any] | None = None) -> Frame:
    """Read a frame off a tokenizer's chat template.

    The model is not to think before it answers: templates that know `enable_thinking` are told so, and a
    thought that a template opens is closed.

    Args:
        tokenizer: With a chat template.
        options: More keyword arguments of the template.

    Raises:
        ValueError: the template refuses such a conversation, or does not write messages as they are.
    """
    how = {"enable_thinking": False, "chat_template": dated_template(tokenizer), **(options or {})}

    def rendered(*messages: tuple[str, str]) -> str:
        chat = [{"role": role, "content": content} for role, content in messages]
        try:
            return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **how))
        # Templates are programs: jinja's own errors, and TypeError, KeyError from inside them.
        except Exception as error:
            raise ValueError(
                f"the tokenizer's chat template refuses a conversation of {len(chat)} messages: {error} "
                "Ask without it: text.chat=false."
            ) from error

    before, after = _cut(rendered(("user", SEAMS[0])), SEAMS[:1])
    _, answering, asking, _ = _cut(
        rendered(("user", SEAMS[0]), ("assistant", SEAMS[1]), ("user", SEAMS[2])), SEAMS
    )
    if after.rstrip().endswith(THINK):
        after = f"{after.rstrip()}\n\n{THOUGHT}\n\n"
    return Frame(before, answering, asking, after)


def _cut(text: str, seams: Sequence[str]) -> list[str]:
    parts = []
    for seam in seams:
        if text.count(seam) != 1:
            raise ValueError(
                "the tokenizer's chat template does not write a message of plain text once, as it is: ask "
                "without it, text.chat=false."
            )
        part, _, text = text.partition(seam)
        parts.append(part)
    return [*parts, text]


def render(
    written: TextItem,
    card: Card,
    tokenizer: Any,
    *,
    chat: bool,
    end_ids: Sequence[int] | None = None,
    begin_ids: Sequence[int] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Item:
    """Render an item of text in the tokens of a model.

    Args:
        written: The text.
        card: How it is answered and scored.
        tokenizer: Of the model.
        chat: Whether a chat template is used, if the tokenizer has one.
        end_ids: Tokens that end an answer; None: those that the tokenizer knows.
        begin_ids: Tokens before a text without a chat template; None: those that the tokenizer puts there.
        options: Keyword arguments of the chat template.
    """
    templated = chat and getattr(tokenizer, "chat_template", None) is not None
    frame = frame_of(tokenizer, options=options) if templated else Frame()
    opening = frame.before + written.context
    begin = () if templated else _begin(tokenizer, begin_ids)
    context_ids = (*begin, *_encode(tokenizer, opening))
    ends = end_ids_of(tokenizer) if end_ids is None else tuple(end_ids)
    asked, earlier = [], ""
    for turn, question in enumerate(written.questions):
        text = earlier + question.question + frame.after + question.answer_prefix
        gold = question.answer or next(iter(question.references), "")
        gold = gold if text[-1:].isspace() else f" {gold}"
        about = {**question.about} | ({"turn": float(turn)} if len(written.questions) > 1 else {})
        read = partial(_answer_text, tokenizer, card, frozenset(ends))
        asked.append(
            Asked(
                question_ids=_at_least_two(_encode_on(tokenizer, text), tokenizer),
                gold_ids=(*_encode_on(tokenizer, gold), *ends[:1]),
                generate=card.max_new_tokens,
                score=partial(_score, read, card, question),
                text=read,
                references=question.references,
                about=about,
            )
        )
        if written.turns:
            known = question.question + (frame.answering if templated else "") + question.answer_prefix
            own = gold if known[-1:].isspace() == text[-1:].isspace() else gold.strip()
            earlier += known + own + frame.asking
    return Item(
        context_ids=context_ids,
        asked=tuple(asked),
        end_ids=ends,
        needles=_token_spans(tokenizer, opening, len(frame.before), len(begin), written.needles),
        about={**written.about, "context_tokens": float(len(context_ids))},
    )


def end_ids_of(tokenizer: Any, more: Sequence[int] = ()) -> tuple[int, ...]:
    """The tokenizer's end of text, the ids of `more` (a generation config's), and known ends of a turn."""
    vocabulary = tokenizer.get_vocab()
    ends = [tokenizer.eos_token_id, *more, *(vocabulary[name] for name in ENDS if name in vocabulary)]
    return tuple(dict.fromkeys(end for end in ends if end is not None))


def _begin(tokenizer: Any, begin_ids: Sequence[int] | None) -> tuple[int, ...]:
    """Tokens that the tokenizer puts before a text, if any."""
    if begin_ids is not None:
        return tuple(begin_ids)
    with_own = tokenizer("a")["input_ids"]
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    return tuple(with_own[: with_own.index(plain[0])]) if plain and plain[0] in with_own else ()


def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _encode_on(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Encode a text that continues another. SentencePiece tokenizers put a blank before every text, which
    belongs before the first one alone."""
    alone = _encode(tokenizer, text)
    mark = tokenizer.convert_ids_to_tokens(list(_encode(tokenizer, "x")[:1]))[0]
    if not str(mark).startswith("\u2581"):
        return alone
    line = _encode(tokenizer, "\n")
    behind = _encode(tokenizer, "\n" + text)
    return behind[len(line) :] if behind[: len(line)] == line else alone


def _at_least_two(ids: tuple[int, ...], tokenizer: Any) -> tuple[int, ...]:
    """Check that a question has two tokens or more, since in `query_aware` its last one is read again."""
    while len(ids) < 2:
        ids = (*_encode(tokenizer, "\n"), *ids)
    return ids


def _answer_text(tokenizer: Any, card: Card, ends: frozenset[int], generated: Sequence[int]) -> str:
    """Decode generated tokens: after a thought, up to the end of the answer."""
    stop = next((place for place, token in enumerate(generated) if token in ends), len(generated))
    text = tokenizer.decode(list(generated[:stop]), skip_special_tokens=True)
    text = text.rpartition(THOUGHT)[2]
    if card.first_line:
        text = first_line(text)
    for end in card.stop:
        text = text.partition(end)[0]
    return text


def _score(read: Any, card: Card, question: TextQuestion, generated: Sequence[int]) -> tuple[float, float]:
    found = METRICS[card.metric](read(generated), question.references, **question.scoring)
    return float(found >= ALL_RIGHT), float(found)


def _token_spans(
    tokenizer: Any, text: str, shift: int, begin: int, spans: Sequence[tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """Convert character spans, counted from `shift` on, to spans of every token that holds a character of
    them, counted from `begin` on."""
    if not spans:
        return ()
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    places = [(place, *own) for place, own in enumerate(offsets, begin) if own[1] > own[0]]
    found = []
    for start, stop in spans:
        held = [place for place, first, last in places if first < stop + shift and last > start + shift]
        if held:
            found.append((held[0], held[-1] + 1))
    return tuple(found)
