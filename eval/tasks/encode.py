"""Turns a row into tokens of a model, and the tokens that it generates into the text that is scored.

With a chat template, context and question are one message of the user; the template's header of the answer,
and the beginning of the answer if the row gives one, follow the question. Context and question are parted in
text, before tokenization, so that no token spans them and the context's tokens do not depend on the question.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from retain.eval.tasks.row import Row
from retain.reference.tokenizer import BOS_ID, FOLDER

# Stands for the message while a chat template is rendered: no template and no task contains it.
MARK = "\u2063retain\u2063"
# Ends of a text or a turn that tokenizers know, apart from their `eos_token`.
ENDS = (
    *("<|im_end|>", "<|end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>"),
    *("<end_of_turn>", "</s>"),
)
THINK, THOUGHT = "<think>", "</think>"
# The day that Llama 3's template writes where it is given none: another day's prompt has another score.
DAY = "26 Jul 2024"


@dataclass(frozen=True)
class Encoded:
    """A row in tokens of a model.

    Attributes:
        context_ids: Token ids of the context, special tokens before it included.
        question_ids: Token ids of all that is read behind the context; at least two.
        answer_ids: A right continuation with its end token, for policies that know the answer.
        end_ids: Tokens that end an answer; none: every answer has exactly `max_new_tokens` tokens.
        evidence: Spans `[start, stop)` of context tokens that hold the answer.
    """

    context_ids: tuple[int, ...]
    question_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    evidence: tuple[tuple[int, int], ...] = ()


def encode(
    row: Row,
    tokenizer: Any,
    model: Any = None,
    *,
    chat: bool = True,
) -> Encoded:
    """Encode a row.

    Args:
        row: Of any source.
        tokenizer: Of the model.
        model: The model, whose configs may name further end tokens and the longest text that it reads.
        chat: Whether a chat template is used, if the tokenizer has one and the row wants one.

    Raises:
        ValueError: The chat template cannot be used, or the model does not read as many tokens.
    """
    if "token_ids" in row.extra:
        ids = row.extra["token_ids"]
        context, question, right = (tuple(ids[name]) for name in ("context", "question", "answer"))
        return Encoded(context, question, right, (), ids["evidence"])
    before, after, begin = "", "", opening_ids(tokenizer)
    if chat and row.extra.get("chat", True) and getattr(tokenizer, "chat_template", None) is not None:
        (before, after), begin = chat_frame(tokenizer), ()
    ends = end_ids_of(tokenizer, model)
    context_ids = (*begin, *_ids(tokenizer, before + row.context))
    text = row.question + after + row.answer_prefix
    question_ids = _continued(tokenizer, text)
    while len(question_ids) < 2:  # its last token is read again where the question is known
        question_ids = (*_ids(tokenizer, "\n"), *question_ids)
    answer = row.extra.get("full_answer") or row.answers[0]
    answer_ids = _continued(tokenizer, answer if text[-1:].isspace() else f" {answer}")
    longest = len(context_ids) + len(question_ids) + row.max_new_tokens
    config = None if model is None else model.config.get_text_config()
    reads = getattr(config, "max_position_embeddings", None) or longest
    if longest > reads:
        raise ValueError(
            f"a row of {row.task} takes {longest} tokens with its question and answer, and the model reads "
            f"{reads}: lower context_tokens."
        )
    evidence = _token_spans(tokenizer, before, row, len(begin))
    return Encoded(context_ids, question_ids, (*answer_ids, *ends[:1]), ends, evidence)


def answer_text(row: Row, generated: Sequence[int], tokenizer: Any) -> str:
    """Text of an answer (token ids up to its end) as it is scored: behind a thought. For a row of token ids,
    the names of the tokens, a space between two."""
    if "token_ids" in row.extra:
        return " ".join(tokenizer.convert_ids_to_tokens(list(generated)))
    text = str(tokenizer.decode(list(generated), skip_special_tokens=True)).rpartition(THOUGHT)[2]
    if row.extra.get("first_line"):
        text = text.lstrip("\n").partition("\n")[0]
    for end in row.extra.get("stop", ()):
        text = text.partition(end)[0]
    return text


def end_ids_of(tokenizer: Any, model: Any = None) -> tuple[int, ...]:
    """The tokenizer's end of text, the end tokens of the model's generation config, and known ends of a
    turn."""
    stated = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    more = [stated] if isinstance(stated, int) else list(stated or ())
    vocabulary = tokenizer.get_vocab()
    ends = [tokenizer.eos_token_id, *more, *(vocabulary[name] for name in ENDS if name in vocabulary)]
    return tuple(dict.fromkeys(end for end in ends if end is not None))


def chat_frame(tokenizer: Any) -> tuple[str, str]:
    """Texts that a chat template writes before the user's message, and between it and the answer.

    The model is not to think before it answers: `enable_thinking` is false, and a thought that a template
    opens is closed.

    Raises:
        ValueError: The template refuses a message, or does not write it as it is.
    """
    how = {"enable_thinking": False, "date_string": DAY}
    chat = [{"role": "user", "content": MARK}]
    try:
        text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **how))
    # Templates are programs: jinja's own errors, and TypeError, KeyError from inside them.
    except Exception as error:
        raise ValueError(
            f"the tokenizer's chat template refuses a user's message: {error} Ask without it: chat=false."
        ) from error
    if text.count(MARK) != 1:
        raise ValueError(
            "the tokenizer's chat template does not write a message of plain text once, as it is: ask "
            "without it, chat=false."
        )
    before, _, after = text.partition(MARK)
    if after.rstrip().endswith(THINK):
        after = f"{after.rstrip()}\n\n{THOUGHT}\n\n"
    return before, after


def opening_ids(tokenizer: Any) -> tuple[int, ...]:
    """Tokens before a text without a chat template: those that the tokenizer puts there, if any."""
    if getattr(tokenizer, "name_or_path", None) == str(FOLDER):
        return (BOS_ID,)  # the reference model's tokenizer puts none there by itself
    whole, plain = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    return tuple(whole[: whole.index(plain[0])]) if plain and plain[0] in whole else ()


def _ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _continued(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Encode a text that continues another. SentencePiece tokenizers put a blank before every text, which
    belongs before the first one alone."""
    alone = _ids(tokenizer, text)
    mark = tokenizer.convert_ids_to_tokens(list(_ids(tokenizer, "x")[:1]))[0]
    if not str(mark).startswith("\u2581"):
        return alone
    line, behind = _ids(tokenizer, "\n"), _ids(tokenizer, "\n" + text)
    return behind[len(line) :] if behind[: len(line)] == line else alone


def _token_spans(tokenizer: Any, before: str, row: Row, begin: int) -> tuple[tuple[int, int], ...]:
    """Spans of every token that holds a character of the row's evidence, counted from `begin` on."""
    evidence = [(start + len(before), stop + len(before)) for start, stop in row.extra.get("evidence", ())]
    if not evidence:
        return ()
    encoded = tokenizer(before + row.context, add_special_tokens=False, return_offsets_mapping=True)
    places = [(place, *span) for place, span in enumerate(encoded["offset_mapping"], begin)]
    held = [
        [place for place, first, last in places if first < min(stop, last) and last > start]
        for start, stop in evidence
    ]
    return tuple((tokens[0], tokens[-1] + 1) for tokens in held if tokens)
