"""From a row to a document: columns of any name, conversations by template, errors that name the row."""

from dataclasses import replace
from typing import Any

import pytest

from retain.train.chat import chat_of, turns
from retain.train.documents import Document
from retain.train.rows import Reader
from retain.train.sources import Row

CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Opens the answer with a thought, which past answers are shown without (as DeepSeek-R1's template does).
THINKING = CHATML.replace("<assistant>{% endif %}", "<assistant><think>\n{% endif %}")
# Shows the content of earlier turns only where there are no later ones.
FORGETFUL = (
    "{% for m in messages %}<{{ m['role'] }}>{% if loop.last %}{{ m['content'] }}{% endif %}{% endfor %}"
)
STRICT = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user comes first') }}{% endif %}" + CHATML


def encode(text: str, special: bool) -> list[int]:
    return [1] * special + [ord(letter) for letter in text]


def tokenizer(template: str | None) -> Any:
    """A real tokenizer of one token a character, with a template."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({chr(i): i for i in range(128)}, unk_token="\0"))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=plain)
    made.chat_template = template
    return made


def text(ids: Any) -> str:
    return "".join(map(chr, ids))


def row(**values: Any) -> Row:
    return Row("d.jsonl line 7", values, tuple(values))


reader = Reader(encode)


@pytest.mark.parametrize(
    ("columns", "values", "context", "appendix"),
    [
        ({"text": "body"}, {"body": "abc", "title": "t"}, "abc", ""),
        ({"context": "story"}, {"story": "abc", "question": 1}, "abc", ""),
        (
            {"context": "input", "question": "instruction", "answer": "output"},
            {"input": "abc", "instruction": "q", "output": 3},
            "abc",
            "[q|3]",
        ),
    ],
    ids=["text", "context", "question"],
)
def test_columns_under_any_name(columns: dict, values: dict, context: str, appendix: str) -> None:
    named = replace(reader, columns=columns, appendix="[{question}|{answer}]")
    document = named.document(row(**values))
    assert document == Document(tuple(encode(context, True)), tuple(encode(appendix, False)))
    assert document.origin == "d.jsonl line 7"


def test_an_answer_needs_no_question() -> None:
    named = replace(reader, columns={"context": "prompt", "answer": "response"}, appendix=" {answer}")
    document = named.document(row(prompt="abc", response="xy"))
    assert document == Document(tuple(encode("abc", True)), tuple(encode(" xy", False)))
    named = replace(reader, columns={"context_ids": "input_ids", "appendix_ids": "labels"})
    assert named.document(row(input_ids=[1, 2], labels=[3])) == Document((1, 2), (3,))
    assert named.document(row(input_ids=[1, 2], labels=None)) == Document((1, 2))
    assert replace(named, max_appendix_tokens=2).document(row(input_ids=[1], labels=[3, 4, 5])) == Document(
        (1,), (3, 4)
    )


@pytest.mark.parametrize(
    ("changes", "values", "message"),
    [
        ({}, {"txet": "?"}, r"line 7 has columns \['txet'\]; wanted `text`.*data.columns=\{text: txet\}"),
        ({}, {"a": 1, "b": 2}, r"has columns \['a', 'b'\]; wanted `text`, or `context`.*data.columns=\{text"),
        ({}, {"context": "a", "answer": "b"}, "wanted `text`, or `context` \\+ `question` \\+ `answer`"),
        ({}, {"text": "a", "messages": []}, r"2 ways, by its columns \['messages', 'text'\]: say which"),
        (
            {"columns": {"text": "bodi"}},
            {"body": "a", "id": 1},
            r"line 7 has no column 'bodi' \(data.columns.text\) \(did you mean 'body'\?\); "
            r"it has \['body', 'id'\]",
        ),
        ({"columns": {"text": "body"}}, {"body": None}, "line 7: column 'body' is null"),
        ({}, {"text": ["a"]}, r"text must be text, got \['a'\] \(list\)"),
        ({}, {"context": "a", "question": 1, "answer": "b"}, r"question must be text, got 1 \(int\)"),
        ({}, {"context": "a", "question": "b", "answer": {"x": 1}}, "answer must be text, got {'x': 1}"),
        ({}, {"context_ids": "abc"}, r"context_ids must be a list of token ids from 0, got 'abc' \(str\)"),
        ({}, {"context_ids": [1, True]}, r"list of token ids from 0, got \[1, True\]"),
        ({}, {"context_ids": [1, -1]}, r"list of token ids from 0, got \[1, -1\]"),
        ({}, {"context_ids": [1], "appendix_ids": [0.5]}, "appendix_ids must be a list of token ids"),
        ({"encode": None}, {"text": "a"}, "line 7 holds text, and the model has no tokenizer"),
        (
            {},
            {"messages": [{"role": "user", "content": "a"}]},
            "line 7: the model has no tokenizer to encode a",
        ),
        ({"max_tokens": 3, "long": "error"}, {"text": "abcd"}, "line 7 has 5 tokens, and data.max_tokens=3"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_rows_that_cannot_be_read(changes: dict, values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(reader, **changes).document(row(**values))


CONVERSATION = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "a?"},
    {"role": "assistant", "content": "A."},
    {"role": "user", "content": "b?"},
    {"role": "assistant", "content": "B."},
]


def chat(template: str | None, messages: list) -> tuple[str, str]:
    context, appendix = chat_of(tokenizer(template))(turns(messages))
    return text(context), text(appendix)


def test_a_conversation_is_cut_before_its_last_assistant_turn() -> None:
    before = "<system>S</><user>a?</><assistant>A.</><user>b?</>"
    assert chat(CHATML, CONVERSATION) == (before + "<assistant>", "B.</>")
    assert chat(CHATML, [*CONVERSATION, {"role": "user", "content": "c?"}]) == (
        before + "<assistant>",
        "B.</>",
    ), "what follows the last answer is left out"
    assert chat(THINKING, CONVERSATION) == (before, "<assistant>B.</>")
    assert chat(CHATML, CONVERSATION[:2]) == ("<system>S</><user>a?</><assistant>", ""), "no answer yet"


def test_sharegpt_conversations_are_the_same() -> None:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    sharegpt = [{"from": names[m["role"]], "value": m["content"]} for m in CONVERSATION]
    assert chat(CHATML, sharegpt) == chat(CHATML, CONVERSATION)
    reads = replace(reader, chat=chat_of(tokenizer(CHATML)))
    one = reads.document(row(conversations=sharegpt))
    assert one == reads.document(row(messages=CONVERSATION)) and one is not None
    assert one == replace(reads, columns={"messages": "dialog"}).document(row(dialog=CONVERSATION))
    # Parquet fills every message with all fields that any has.
    filled = [{**m, "tool_calls": None} for m in CONVERSATION]
    assert turns(filled) == CONVERSATION


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, CONVERSATION, "line 7: the tokenizer has no chat template.*instruction-tuned"),
        (STRICT, CONVERSATION, "template refuses this conversation .*user comes first"),
        (FORGETFUL, CONVERSATION, "writes earlier turns differently"),
        (CHATML, CONVERSATION[2:3], "the only assistant turn is the first message"),
        (CHATML, [], r"wanted a list of messages, got \[\] \(list\)"),
        (CHATML, "hello", r"wanted a list of messages, got 'hello' \(str\)"),
        (CHATML, ["hello"], r"message 0 is 'hello' \(str\); wanted"),
        (CHATML, [{"role": "user"}], r"message 0 \(user\) has no content"),
        (CHATML, [{"text": "a"}], r"message 0 has fields \['text'\]; wanted role and content"),
        (CHATML, [{"from": "me", "value": "a"}], "message 0 is from 'me'; known speakers: human, user, gpt"),
    ],
    ids=range(10),
)
def test_conversations_that_cannot_be_read(template: str | None, messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(reader, chat=chat_of(tokenizer(template))).document(row(messages=messages))


def test_conversations_are_not_cut() -> None:
    reads = replace(reader, chat=chat_of(tokenizer(CHATML)), max_tokens=20, lengths=(5,))
    with pytest.raises(ValueError, match="a conversation cannot be cut, as its last question would be lost"):
        reads.document(row(messages=CONVERSATION))
    assert replace(reads, long="skip").document(row(messages=CONVERSATION)) is None
    whole = replace(reads, max_tokens=100).document(row(messages=CONVERSATION))
    assert whole is not None and len(whole.context_ids) > 50
