"""From a row to a document: columns of any name, conversations by template, errors that name the row."""

import json
from pathlib import Path
from typing import Any

import pytest

from retain.train.data.chat import chat_of, tools_of, turns
from retain.train.data.document import Document
from retain.train.data.rows import Reader
from retain.train.data.settings import DataSettings
from retain.train.data.sources import Dataset, JsonLines, Row
from tests.refused import refused
from tests.train.made import encode_letters

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
    return Row("d.jsonl line 7", values)


def reader(*, encode: Any = encode_letters, template: Any = CHATML, **settings: Any) -> Reader:
    """A reader of short documents, with a chat template."""
    chat = None if template == "" else chat_of(tokenizer(template))
    return Reader(DataSettings(**{"max_tokens": 10_000, **settings}), encode, chat)


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
    named = reader(columns=columns, appendix="[{question}|{answer}]")
    document = named.document(row(**values))
    assert document == Document(tuple(encode_letters(context, True)), tuple(encode_letters(appendix, False)))
    assert document.origin == "d.jsonl line 7"


def test_an_answer_needs_no_question() -> None:
    named = reader(columns={"context": "prompt", "answer": "response"}, appendix=" {answer}")
    document = named.document(row(prompt="abc", response="xy"))
    assert document == Document(tuple(encode_letters("abc", True)), tuple(encode_letters(" xy", False)))
    named = reader(columns={"context_ids": "input_ids", "appendix_ids": "labels"})
    assert named.document(row(input_ids=[1, 2], labels=[3])) == Document((1, 2), (3,))
    assert named.document(row(input_ids=[1, 2], labels=None)) == Document((1, 2))
    named = reader(columns={"context_ids": "input_ids", "appendix_ids": "labels"}, max_appendix_tokens=2)
    assert named.document(row(input_ids=[1], labels=[3, 4, 5])) == Document((1,), (3, 4))


@pytest.mark.parametrize(
    ("changes", "values", "message"),
    [
        ({}, {"txet": "?"}, r"line 7 has columns \['txet'\]; wanted `text`.*data.columns=\{text: txet\}"),
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
        ({}, {"context_ids": "abc"}, r"context_ids must be a list of token ids from 0, got 'abc' \(str\)"),
        ({}, {"context_ids": [1, -1]}, r"list of token ids from 0, got \[1, -1\]"),
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
    refused(message, reader(**{"template": "", **changes}).document, row(**values))


CONVERSATION = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "a?"},
    {"role": "assistant", "content": "A."},
    {"role": "user", "content": "b?"},
    {"role": "assistant", "content": "B."},
]


def chat(template: str | None, messages: list) -> tuple[str, str]:
    context, appendix = chat_of(tokenizer(template))(turns(messages), ())
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
    reads = reader()
    one = reads.document(row(conversations=sharegpt))
    assert one == reads.document(row(messages=CONVERSATION)) and one is not None
    assert one == reader(columns={"messages": "dialog"}).document(row(dialog=CONVERSATION))
    # Null counts as not given in a message's own fields, but for a content that tool calls take the place of.
    filled = [{**m, "tool_calls": None} for m in CONVERSATION]
    assert turns(filled) == CONVERSATION
    called = [{"role": "assistant", "content": None, "tool_calls": [{}]}]
    assert turns(called) == called


def test_contents_in_text_parts_are_read_as_one_text() -> None:
    """OpenAI's usual form."""

    def parts(text: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": piece} for piece in (text[:1], text[1:])]

    listed = [{**m, "content": parts(m["content"])} for m in CONVERSATION]
    assert turns(listed) == CONVERSATION
    assert reader().document(row(messages=listed)) == reader().document(row(messages=CONVERSATION))
    assert turns([{"from": "human", "value": parts("a?")}]) == [{"role": "user", "content": "a?"}]
    image = {"type": "image_url", "image_url": {}}
    messages = [CONVERSATION[0], {"role": "user", "content": [*parts("a?"), image]}]
    said = "line 7: part 2 of the content of message 1 is of type 'image_url', and only text can be read"
    refused(said, reader().document, row(messages=messages))


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, CONVERSATION, "line 7: the tokenizer has no chat template.*instruction-tuned"),
        (STRICT, CONVERSATION, "template refuses this conversation .*user comes first"),
        (FORGETFUL, CONVERSATION, "writes earlier turns differently"),
        (CHATML, CONVERSATION[2:3], "the only assistant turn is the first message"),
        (CHATML, [], r"wanted a list of messages, got \[\] \(list\)"),
        (CHATML, [{"role": "user"}], r"message 0 \(user\) has no content"),
        (CHATML, [{"from": "me", "value": "a"}], "message 0 is from 'me'; known speakers: human, user, gpt"),
    ],
    ids=range(7),
)
def test_conversations_that_cannot_be_read(template: str | None, messages: Any, message: str) -> None:
    refused(message, reader(template=template).document, row(messages=messages))


def test_a_template_that_writes_the_date_writes_the_same_one_every_day(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import datetime as clock

    from transformers.utils import chat_template_utils

    dated = "<{{ strftime_now('%d %b %Y') }}>" + CHATML
    found = []
    for day in (1, 2):

        class Day(clock.datetime):
            @classmethod
            def now(cls, tz: Any = None, day: int = day) -> "Day":
                return cls(2031, 5, day)

        monkeypatch.setattr(chat_template_utils, "datetime", Day)
        plain = tokenizer(dated).apply_chat_template(CONVERSATION, tokenize=False)
        assert plain.startswith(f"<0{day} May 2031>"), "the clock that templates see"
        found.append(chat(dated, CONVERSATION))
    assert found[0] == found[1] and found[0][0].startswith("<26 Jul 2024><system>")


TOOLS = "{% if tools %}{{ tools | map(attribute='name') | join(',') }}|{% endif %}"
CALLING = TOOLS + (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{% set f = c['function'] %}"
    "{{ f['name'] }}{{ f['arguments'].x }}{% endfor %}"
    "</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALLED = [
    {"from": "human", "value": "a?"},
    {"from": "function_call", "value": '{"name": "add", "arguments": {"x": 1}}'},
    {"from": "observation", "value": "2"},
    {"from": "gpt", "value": "two"},
]


def test_function_calls_and_tools_reach_the_template() -> None:
    wanted = ("<user>a?</><assistant>add1</><tool>2</><assistant>", "two</>")
    assert chat(CALLING, CALLED) == wanted
    assert turns([{"from": "function_call", "value": "add(1)"}]) == [
        {"role": "assistant", "content": "add(1)"}
    ]
    reads = reader(template=CALLING)
    for tools in ([{"name": "add", "about": None}], '[{"name": "add"}]'):
        document = reads.document(row(conversations=CALLED, tools=tools))
        assert document is not None and text(document.context_ids) == "add|" + wanted[0]
    for nothing in (None, [], "", "[]"):
        document = reads.document(row(conversations=CALLED, tools=nothing))
        assert document is not None and text(document.context_ids) == wanted[0]
    deaf = reader()
    with pytest.raises(
        ValueError, match="line 7: the row has tools, and .* does not write them: .*data.columns"
    ):
        deaf.document(row(messages=CONVERSATION, tools=[{"name": "add"}]))
    named = reader(columns={"messages": "messages"})
    assert named.document(row(messages=CONVERSATION, tools=[{"name": "add"}])) is not None
    for wrong in ("{", "3", [3], {"name": "add"}):
        refused("line 7: .*tools", reads.document, row(conversations=CALLED, tools=wrong))


WRITTEN = (
    "{{ tools | tojson }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{{ m['tool_calls'] | tojson if m['tool_calls'] else '' }}</>{% endfor %}"
)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_an_author_s_nulls_are_trained_on(tmp_path: Path, kind: Any) -> None:
    """Of parquet, which gives every object the fields of all others, no null is."""
    import pyarrow
    import pyarrow.parquet

    def made(tool: dict, arguments: dict) -> dict:
        call = {"function": {"name": "book", "arguments": arguments}}
        messages = [
            {"role": "user", "content": "a?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "two"},
        ]
        return {"messages": messages, "tools": [{"name": "book", **tool}]}

    rows = [made({"default": None}, {"seat": None, "n": 1}), made({"default": 3}, {"seat": 7})]
    if kind == "jsonl":
        (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    reads = reader(template=WRITTEN)
    read = [
        reads.document(row)
        for row in (JsonLines(str(tmp_path)) if kind == "jsonl" else Dataset(kind, str(tmp_path))).open()
    ]
    one, two = (text(document.context_ids) for document in read if document is not None)
    nulls = ('"seat": null, ', ', "default": null') if kind == "jsonl" else ("", "")
    assert f'"arguments": {{{nulls[0]}"n": 1}}' in one and f'{{"name": "book"{nulls[1]}}}' in one
    # Earlier versions of Arrow sort the fields of an object.
    tools = ('{"name": "book", "default": 3}', '{"default": 3, "name": "book"}')
    assert '"arguments": {"seat": 7}' in two and any(tool in two for tool in tools)
    # What is written as JSON text has its nulls in any file.
    (tool,) = tools_of('[{"name": "book", "default": null}]')
    assert tool == {"name": "book", "default": None}


def test_half_a_character_in_a_conversation_is_found() -> None:
    with pytest.raises(ValueError, match=r"message 1 holds half of a character, \\ud83d at place 2"):
        turns([CONVERSATION[0], {"role": "user", "content": "ab\ud83d"}])
    refused("tools holds half", tools_of, [{"name": {"deep": ["\ud83d"]}}])
    for values in (
        {"context": "a", "question": "\udc00", "answer": "b"},
        {"context": "a", "question": "b", "answer": ["\udc00"]},
    ):
        refused("line 7: (question|answer) holds half of a character", reader().document, row(**values))


def test_conversations_are_not_cut() -> None:
    short = {"max_tokens": 20, "lengths": (5,)}
    with pytest.raises(ValueError, match="a conversation cannot be cut, as its last question would be lost"):
        reader(**short).document(row(messages=CONVERSATION))
    assert reader(**short, long="skip").document(row(messages=CONVERSATION)) is None
    whole = reader(max_tokens=100, lengths=(5,)).document(row(messages=CONVERSATION))
    assert whole is not None and len(whole.context_ids) > 50


def byte_pairs() -> Any:
    """A tokenizer as language models have them: merged bytes of words, a blank before each."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned = trainers.BpeTrainer(vocab_size=400, show_progress=False, special_tokens=["<s>", "</s>"])
    made.train_from_iterator(["the cat sat on the mat and the hat of the rat"] * 3, learned)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return made


@pytest.mark.parametrize("blank", [" ", "\n", "\n\n  ", ""])
@pytest.mark.parametrize("long", ["cut", "skip", "error"])
def test_of_a_long_text_only_what_may_be_kept_is_encoded(blank: str, long: Any) -> None:
    """Ten million characters of one line, of which 160 tokens are kept, cost a tokenizer gigabytes."""
    made, seen = byte_pairs(), []

    def encode(text: str, special: bool) -> list[int]:
        seen.append(len(text))
        return made.encode(text, add_special_tokens=special).ids

    words = ["the", "rat", "sat", "éé", "on", "mats,", "日本", "hatter"]
    text = blank.join(words[i * i % 8] for i in range(6000))
    reads = reader(encode=encode, max_tokens=40, max_appendix_tokens=20, long=long)
    values = row(context=text, question=text, answer="x")
    whole = encode(text, True)
    seen.clear()
    if long == "error":
        refused("line 7 has at least 41 tokens, and data.max_tokens=40", reads.document, values)
    elif long == "skip":
        assert reads.document(values) is None
    else:
        document = reads.document(values)
        assert document is not None
        assert document.context_ids == tuple(whole[:40])
        assert document.appendix_ids == tuple(encode(f"\n{text}\nx", False)[:20])
        seen.pop()
    assert sum(seen) < 6 * 16 * (41 + 64) < len(text)
    # Where a token is long, more of the text is taken until there are enough, or all of it.
    blanks = reader(encode=lambda text, special: [len(text) // 500] * (len(text) // 500), max_tokens=40)
    assert blanks.document(row(text="x" * 500 * 80)).context_ids == (80,) * 40
