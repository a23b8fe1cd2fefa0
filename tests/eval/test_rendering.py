"""Text of a task as tokens: with every kind of chat template, and with tokenizers of both kinds."""

from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from retain.eval.tasks import text_suite as text_module
from retain.eval.tasks.rendering import Frame, end_ids_of, frame_of, render
from retain.eval.tasks.task_card import Card, TextItem, TextQuestion
from retain.eval.tasks.text_suite import text_suite
from retain.hf.dated_template import TODAY, dated_template
from retain.reference import load_tokenizer
from tests.chat import TEMPLATES, chat_tokenizer
from tests.refused import refused
from tests.tiny import tiny_model

CONTEXT = "The river runs to the sea. The user asked for a model."
CARD = Card("about", "made", "ruler_all", 8, "here", "none", "synthetic")


def written(*questions: str, turns: bool = False, prefix: str = "") -> TextItem:
    asked = tuple(TextQuestion(question, (f"answer {n}",), prefix) for n, question in enumerate(questions))
    return TextItem(CONTEXT, asked, turns=turns, needles=((4, 9),))


def whole(tokenizer, messages) -> str:
    return tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_context_and_question_are_the_templates_own_conversation(name: str) -> None:
    tokenizer = chat_tokenizer(name, "bytes")
    item = render(written("\nWhat is it?", prefix="It is"), CARD, tokenizer, chat=True)
    read = tokenizer.decode([*item.context_ids, *item.question_ids], skip_special_tokens=False)
    said = whole(tokenizer, [{"role": "user", "content": f"{CONTEXT}\nWhat is it?"}])
    closed = "\n</think>\n\n" if name == "qwen" else ""  # of a template that opens a thought
    assert read == f"{said}{closed}It is"
    if tokenizer.bos_token_id is not None:
        assert item.context_ids.count(tokenizer.bos_token_id) == read.count(tokenizer.bos_token) <= 1
    (start, stop) = item.needles[0]
    assert "river" in tokenizer.decode(list(item.context_ids[start:stop]))


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_later_turns_are_messages_of_their_own(name: str) -> None:
    tokenizer = chat_tokenizer(name, "bytes")
    item = render(written("\nFirst?", "Second?", turns=True), CARD, tokenizer, chat=True)
    read = tokenizer.decode([*item.context_ids, *item.asked[1].question_ids], skip_special_tokens=False)
    messages = [
        {"role": "user", "content": f"{CONTEXT}\nFirst?"},
        {"role": "assistant", "content": "answer 0"},
        {"role": "user", "content": "Second?"},
    ]
    closed = "\n</think>\n\n" if name == "qwen" else ""
    # A blank before the answer is ours where the template writes none: it goes on from there.
    assert "".join(read.split()) == "".join((whole(tokenizer, messages) + closed).split())
    assert [one.about["turn"] for one in item.asked] == [0.0, 1.0]
    apart = render(written("\nFirst?", "Second?"), CARD, tokenizer, chat=True)
    assert "answer 0" not in tokenizer.decode(list(apart.asked[1].question_ids))


def test_an_item_is_the_same_tomorrow() -> None:
    tokenizer = chat_tokenizer("chatml", "bytes")
    dated = "{{ strftime_now('%d %b %Y') }}: " + tokenizer.chat_template
    tokenizer = chat_tokenizer.__wrapped__("chatml", "bytes")
    tokenizer.chat_template = dated
    said = frame_of(tokenizer).before
    assert said.startswith("26 Jul 2024: ")  # scores of another day's prompt are others


def test_every_way_to_write_a_day_is_that_of_the_fixed_one() -> None:
    tokenizer = chat_tokenizer.__wrapped__("chatml", "bytes")
    assert dated_template(tokenizer) is None
    how = "%A %B %-d %e %H:%M:%S %j %y"
    # As gpt-oss does it, in a macro; as Llama 3 does it, where it is defined.
    tokenizer.chat_template = (
        "{% macro today() %}{{ strftime_now('" + how + "') }}{% endmacro %}"
        "{% if strftime_now is defined %}{{ today() }}{% endif %}"
    )
    said = tokenizer.apply_chat_template(
        [{"role": "user", "content": ""}], chat_template=dated_template(tokenizer), tokenize=False
    )
    assert said == TODAY.strftime(how) == "Friday July 26 26 00:00:00 208 24"


def test_what_a_template_may_be_told() -> None:
    tokenizer = chat_tokenizer.__wrapped__("chatml", "bytes")
    tokenizer.chat_template += "{% if enable_thinking %}<think>{% endif %}{{ more }}"
    assert frame_of(tokenizer, options={"more": "!"}).after.endswith("assistant\n!")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    refused("does not write a message of plain text once, as it is", frame_of, tokenizer)
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(ValueError, match="refuses a conversation of 1 messages: no such role.*chat=false"):
        frame_of(tokenizer)


def test_without_a_template_nothing_is_around_a_message() -> None:
    tokenizer = load_tokenizer()
    item = render(written("\nFirst?", "Second?", turns=True, prefix="It is"), CARD, tokenizer, chat=True)
    assert tokenizer.decode(list(item.context_ids)) == CONTEXT
    assert tokenizer.decode(list(item.asked[0].question_ids)) == "\nFirst?It is"
    assert tokenizer.decode(list(item.asked[1].question_ids)) == "\nFirst?It is answer 0\n\nSecond?It is"
    apart = render(written("\nFirst?", "\nSecond?"), CARD, tokenizer, chat=True)
    assert tokenizer.decode(list(apart.asked[1].question_ids)) == "\nSecond?"
    assert [dict(asked.about) for asked in apart.asked] == [{"turn": 0.0}, {"turn": 1.0}]
    begun = render(written("?"), CARD, tokenizer, chat=True, begin_ids=(1,), end_ids=(2, 9))
    assert begun.context_ids == (1, *item.context_ids) and begun.end_ids == (2, 9)
    assert begun.needles[0][0] == item.needles[0][0] + 1
    assert len(begun.question_ids) >= 2 and Frame() == Frame("", "", "\n\n", "")


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


def test_no_blank_stands_at_a_seam_that_the_text_has_not() -> None:
    tokenizer = sentencepiece()
    for question in ("Next line of x", "\nNext line", " y x"):
        item = render(written(question), CARD, tokenizer, chat=True)
        read = [*item.context_ids, *item.question_ids]
        assert tokenizer.decode(read, clean_up_tokenization_spaces=False) == CONTEXT + question
    assert tokenizer.convert_ids_to_tokens(item.gold_ids[0])[:2] != "\u2581\u2581"
    assert tokenizer.decode([*read, *item.gold_ids[:-1]]) == CONTEXT + " y x answer 0"


def test_a_text_begins_as_the_tokenizer_begins_one() -> None:
    tokenizer = sentencepiece()
    plain = render(written("\nx"), CARD, tokenizer, chat=True)
    assert plain.context_ids[0] != tokenizer.bos_token_id  # it has one, and puts it nowhere
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    begun = render(written("\nx"), CARD, tokenizer, chat=True)
    assert begun.context_ids == (tokenizer.bos_token_id, *plain.context_ids)
    assert begun.question_ids == plain.question_ids


@pytest.mark.parametrize(
    ("said", "scored"),
    [("answer 0", 1.0), ("so <think>answer 0</think> nothing", 0.0), ("<think>no</think>answer 0", 1.0)],
)
def test_what_a_model_thinks_is_not_scored(said: str, scored: float) -> None:
    tokenizer = load_tokenizer()
    asked = render(written("\n?"), CARD, tokenizer, chat=True).asked[0]
    assert asked.score(tokenizer(said, add_special_tokens=False)["input_ids"])[1] == scored


def saved(folder, **how):
    """A suite of needles for a model of this folder."""
    model = tiny_model("qwen3", vocab_size=len(load_tokenizer()), **how)
    model.generation_config = GenerationConfig(eos_token_id=[2, 17])
    model.save_pretrained(folder)
    load_tokenizer().save_pretrained(folder)
    return text_suite(model=str(folder), tasks=("niah",))


def test_an_answer_ends_at_any_end_that_the_model_knows(tmp_path) -> None:
    names = {"<|eom_id|>": 7, "</s>": 9}
    stub = type("Stub", (), {"eos_token_id": 2, "get_vocab": lambda self: {"a": 1, **names}})()
    assert end_ids_of(stub, (5, 2)) == (2, 5, 7, 9)
    suite = saved(tmp_path)
    item = suite.item("niah/grid", 0, 0, 600)
    assert item.end_ids == (2, 17)
    with torch.no_grad():
        assert suite.load_model(0)(torch.tensor([item.context_ids])).logits.shape[1] == len(item.context_ids)


def test_an_item_that_the_model_cannot_take_is_refused(tmp_path) -> None:
    suite = saved(tmp_path, max_position_embeddings=200)
    with pytest.raises(ValueError, match="an item of niah/grid .* and .* takes 200: lower context_tokens by"):
        suite.item("niah/grid", 0, 0, 600)


def test_what_is_changed_is_not_official(monkeypatch) -> None:
    monkeypatch.setattr(text_module, "sizes", lambda: {})  # of data sets that are not here
    needle, trec = "ruler/niah_single_1", "longbench/trec"

    def provenance(**how) -> list[str]:
        suite = text_suite(model="reference:0", tasks=(needle, trec), **how)
        assert all(task.seeded for task in suite.tasks.values())
        return [suite.tasks[name].provenance for name in (needle, trec)]

    assert provenance() == provenance(changes={"longbench": {"path": "x"}}) == ["official", "official"]
    assert provenance(chat=False) == ["changed", "official"]  # trec has no chat template anyway
    assert provenance(changes={needle: {"keys": 2}}) == ["changed", "official"]
    with pytest.raises(ValueError, match="unknown task or group 'rulre': did you mean 'ruler'"):
        text_suite(model="reference:0", tasks=("rulre",))
    refused("unknown task or group 'niah'", provenance, changes={"niah": {}})


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("of_card", [True, False])
def test_a_chat_template_is_used_where_settings_and_card_want_it(of_card, wanted, monkeypatch):
    class RenderedError(Exception):
        pass

    def render(*given, chat, **how):
        raise RenderedError(chat)

    name, card = "niah/grid", replace(text_module.cards()["niah/grid"], chat=of_card)
    monkeypatch.setattr(text_module, "render", render)
    monkeypatch.setattr(text_module, "cards", lambda: {name: card})
    with pytest.raises(RenderedError) as found:
        text_module.text_item(text_module.TextSettings(chat=wanted), name, 0, 0, 400)
    assert found.value.args == (of_card and wanted,)
