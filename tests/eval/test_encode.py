"""Rows as tokens: with every kind of chat template, and with tokenizers of both kinds."""

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig, PreTrainedTokenizerFast

from retain.eval.tasks.encode import answer_text, chat_frame, encode, end_ids_of
from retain.eval.tasks.row import Row
from retain.reference import load_tokenizer
from tests.chat import TEMPLATES, chat_tokenizer
from tests.refused import refused
from tests.tiny import tiny_model

CONTEXT = "The river runs to the sea. The user asked for a model."


def row(question: str = "\n?", prefix: str = "", **extra) -> Row:
    extra = {"evidence": [(4, 9)], **extra}
    return Row("made", CONTEXT, question, ("answer 0",), 8, answer_prefix=prefix, extra=extra)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_context_and_question_are_the_conversation_that_the_template_writes(name):
    tokenizer = chat_tokenizer(name, "bytes")
    encoded = encode(row("\nWhat is it?", prefix="It is"), tokenizer)
    read = tokenizer.decode([*encoded.context_ids, *encoded.question_ids], skip_special_tokens=False)
    said = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{CONTEXT}\nWhat is it?"}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    closed = "\n</think>\n\n" if name == "qwen" else ""  # of a template that opens a thought
    assert read == f"{said}{closed}It is"
    if tokenizer.bos_token_id is not None:
        assert encoded.context_ids.count(tokenizer.bos_token_id) == read.count(tokenizer.bos_token) <= 1
    ((start, stop),) = encoded.evidence
    assert "river" in tokenizer.decode(list(encoded.context_ids[start:stop]))
    without = (encode(row(), tokenizer, chat=False), encode(row(chat=False), tokenizer))
    assert without[0] == without[1] != encode(row(), tokenizer)


def test_the_day_of_a_template_is_always_the_same():
    """Scores of another day's prompt would be others. As Llama 3 writes it."""
    tokenizer = chat_tokenizer.__wrapped__("chatml", "bytes")
    tokenizer.chat_template = (
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
        "{{ date_string }}: {{ messages[0].content }}"
    )
    assert chat_frame(tokenizer)[0] == "26 Jul 2024: "


def test_a_template_that_changes_a_message_is_refused():
    tokenizer = chat_tokenizer.__wrapped__("chatml", "bytes")
    tokenizer.chat_template += "{% if enable_thinking %}<think>{% endif %}"
    assert chat_frame(tokenizer)[1].endswith("assistant\n")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    refused("does not write a message of plain text once, as it is", chat_frame, tokenizer)
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    refused("refuses a user's message: no such role.*chat=false", chat_frame, tokenizer)


def test_without_a_template_nothing_is_around_a_message():
    tokenizer = load_tokenizer()
    encoded = encode(row("\nFirst?", prefix="It is"), tokenizer)
    assert tokenizer.decode(list(encoded.context_ids[1:])) == CONTEXT
    assert encoded.context_ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(list(encoded.question_ids)) == "\nFirst?It is"
    assert len(encode(row(""), tokenizer).question_ids) == 2


def sentencepiece() -> PreTrainedTokenizerFast:
    """A tokenizer that puts a blank before every text, as Llama 2's does."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_of = [f"<0x{number:02X}>" for number in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", "<s>", "</s>", *bytes_of], show_progress=False
    )
    tokenizer.train_from_iterator([CONTEXT, "\nWhat is it? answer 0 Next line", "x y"] * 5, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def test_no_blank_is_added_between_context_question_and_answer():
    tokenizer = sentencepiece()
    for question in ("Next line of x", "\nNext line", " y x"):
        encoded = encode(row(question), tokenizer)
        read = [*encoded.context_ids, *encoded.question_ids]
        assert tokenizer.decode(read, clean_up_tokenization_spaces=False) == CONTEXT + question
    assert tokenizer.decode([*read, *encoded.answer_ids[:-1]]) == CONTEXT + " y x answer 0"


def test_a_text_begins_as_the_tokenizer_begins_one():
    tokenizer = sentencepiece()
    plain = encode(row("\nx"), tokenizer)
    assert plain.context_ids[0] != tokenizer.bos_token_id  # it has one, and puts it nowhere
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    begun = encode(row("\nx"), tokenizer)
    assert begun.context_ids == (tokenizer.bos_token_id, *plain.context_ids)
    assert begun.question_ids == plain.question_ids and begun.evidence[0][0] == plain.evidence[0][0] + 1


@pytest.mark.parametrize(
    ("said", "extra", "scored"),
    [
        ("so <think>answer 0</think> nothing", {}, " nothing"),
        ("<think>no</think>answer 0", {}, "answer 0"),
        ("\n\n yes\nno", {"first_line": True}, " yes"),
        ("yes\nQuestion: no", {"stop": ["\nQuestion"]}, "yes"),
    ],
)
def test_an_answer_is_scored_behind_a_thought_and_up_to_its_end(said, extra, scored):
    tokenizer = load_tokenizer()
    ids = tokenizer(said, add_special_tokens=False)["input_ids"]
    assert answer_text(row(**extra), ids, tokenizer) == scored


def test_an_answer_ends_at_any_end_that_the_model_knows():
    names = {"<|eom_id|>": 7, "</s>": 9}
    stub = type("Stub", (), {"eos_token_id": 2, "get_vocab": lambda self: {"a": 1, **names}})()
    config = GenerationConfig(eos_token_id=[5, 2])
    assert end_ids_of(stub, type("Model", (), {"generation_config": config})()) == (2, 5, 7, 9)


def test_a_row_that_the_model_cannot_take_is_refused():
    model = tiny_model("qwen3", vocab_size=len(load_tokenizer()), max_position_embeddings=20)
    said = "a row of made takes .* and the model reads 20: lower context_tokens"
    refused(said, encode, row(), load_tokenizer(), model)
