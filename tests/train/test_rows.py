"""From a row to a document: columns of any name, conversations by template, errors that name the row."""

from typing import Any

import pytest

from retain.train.data.chat import chat_of, turns
from retain.train.data.document import Document
from retain.train.data.rows import Reader
from retain.train.data.settings import DataSettings
from retain.train.data.sources import Row
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


IDS = {"context_ids": "input_ids", "appendix_ids": "labels"}


@pytest.mark.parametrize(
    ("columns", "values", "context", "appendix"),
    [
        ({"text": "body"}, {"body": "abc", "title": "t", "messages": 1}, "abc", ""),
        ({"context": "story"}, {"story": "abc", "question": "q", "answer": "a"}, "abc", "\nq\na"),
        (IDS, {"input_ids": [1, 97], "labels": [98]}, "a", "b"),
        (IDS, {"input_ids": [1, 97], "labels": None}, "a", ""),
        ({}, {"context_ids": [1, 97]}, "a", ""),
    ],
)
def test_columns_under_any_name(columns: dict, values: dict, context: str, appendix: str) -> None:
    document = reader(columns=columns).document(row(**values))
    assert document == Document(tuple(encode_letters(context, True)), tuple(encode_letters(appendix, False)))
    assert document.origin == "d.jsonl line 7"


@pytest.mark.parametrize(
    ("changes", "values", "message"),
    [
        ({}, {"txet": "?"}, r"line 7: columns are \['txet'\]; wanted exactly one of context_ids, messages,"),
        ({}, {"text": "a", "messages": []}, r"\['messages', 'text'\]; wanted exactly one .*data.columns,"),
        ({"columns": {"txet": "a"}}, {"a": "b"}, r"wanted exactly one .* \(got {'txet': 'a'}\)"),
        ({"columns": {"text": "a", "answer": "b"}}, {"a": "b"}, "wanted exactly one .*and what goes with it"),
        (
            {"columns": {"text": "bodi"}},
            {"body": "a", "id": 1},
            r"line 7: column 'bodi' \(data.columns.text\) is not there \(did you mean 'body'\?\)",
        ),
        ({"columns": {"text": "body"}}, {"body": None}, r"column 'body' \(data.columns.text\) is null"),
        ({}, {"context": "a", "answer": "b"}, r"column 'question' \(data.columns.question\) is not there"),
        ({}, {"text": ["a"]}, r"text must be text, got \['a'\] \(list\)"),
        ({}, {"context": "a", "question": 1, "answer": "b"}, r"question must be text, got 1 \(int\)"),
        ({}, {"context": "a", "question": "\udc00", "answer": "b"}, "line 7: .*surrogates not allowed"),
        ({}, {"context_ids": "abc"}, "context_ids must be a list of token ids from 0, got 'abc'"),
        ({}, {"context_ids": [1, -1]}, r"list of token ids from 0, got \[1, -1\]"),
        ({}, {"context_ids": [2**63]}, "list of token ids from 0"),
        ({"encode": None}, {"text": "a"}, "line 7: it holds text, and the model has no tokenizer"),
        ({}, {"messages": [{"role": "user", "content": "a"}]}, "holds messages, and the model has no tok"),
    ],
    ids=range(15),
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


def test_a_conversation_in_a_column_of_any_name_and_fields_that_are_null() -> None:
    filled = [{**m, "tool_calls": None, "name": None} for m in CONVERSATION]
    assert turns(filled) == CONVERSATION
    document = reader(columns={"messages": "dialog"}).document(row(dialog=filled))
    assert document is not None and text(document.appendix_ids) == "B.</>"


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, CONVERSATION, "line 7: the tokenizer has no chat template.*instruction-tuned"),
        (STRICT, CONVERSATION, "template refuses this conversation .*user comes first"),
        (FORGETFUL, CONVERSATION, "writes earlier turns differently"),
        (CHATML, CONVERSATION[2:3], "the only assistant turn is the first message"),
        (CHATML, [], r"wanted a list of messages, got \[\]"),
        (CHATML, [{"role": "user", "content": [{"type": "text"}]}], "message 0 .* wanted role and content"),
        (CHATML, [{"role": "assistant", "content": "", "tool_calls": [{}]}], "message 0 .* no tool calls"),
        (CHATML, [{"role": "user", "content": "ab\ud83d"}], "line 7: .*surrogates not allowed"),
    ],
    ids=range(8),
)
def test_conversations_that_cannot_be_read(template: str | None, messages: Any, message: str) -> None:
    refused(message, reader(template=template).document, row(messages=messages))


def test_a_template_that_takes_the_day_writes_the_same_one_every_day() -> None:
    dated = "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    context, _ = chat(dated + "<{{ date_string }}>" + CHATML, CONVERSATION)
    assert context.startswith("<26 Jul 2024><system>")


def test_conversations_are_not_cut() -> None:
    small = {"max_tokens": 20, "lengths": (5,)}
    said = "a conversation cannot be cut, as its last question would be lost"
    refused(said, reader(**small).document, row(messages=CONVERSATION))
    assert reader(**small, short="skip").document(row(messages=CONVERSATION)) is None
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
def test_of_a_long_text_only_what_may_be_kept_is_encoded(blank: str) -> None:
    """Ten million characters of one line, of which 160 tokens are kept, cost a tokenizer gigabytes."""
    made, seen = byte_pairs(), []

    def encode(text: str, special: bool) -> list[int]:
        seen.append(len(text))
        return made.encode(text, add_special_tokens=special).ids

    words = ["the", "rat", "sat", "éé", "on", "mats,", "日本", "hatter"]
    text = blank.join(words[i * i % 8] for i in range(6000))
    whole = encode(text, True)
    seen.clear()
    document = reader(encode=encode, max_tokens=40).document(row(text=text))
    assert document is not None and document.context_ids == tuple(whole[:40])
    assert sum(seen) < 3 * 16 * (40 + 64) < len(text)
    # Where a token is long, more of the text is taken until there are enough, or all of it.
    blanks = reader(encode=lambda text, special: [len(text) // 500] * (len(text) // 500), max_tokens=40)
    assert blanks.document(row(text="x" * 500 * 80)).context_ids == (80,) * 40
