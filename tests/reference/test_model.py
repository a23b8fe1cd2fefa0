"""The reference model that comes with the package: it answers, its tokenizer takes any text."""

from retain.reference import load_model, load_tokenizer
from tests.refused import refused


def test_there_is_one_model() -> None:
    refused("no reference model of seed 1: there is reference:0 alone", load_model, 1)


def test_the_tokenizer_encodes_any_text() -> None:
    tokenizer = load_tokenizer()
    for text in ("def f(x):\n\treturn x", "Grüße, 你好 🙂", "\x00\x7f"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert tokenizer("<q> get name<a>")["input_ids"][0] == tokenizer.convert_tokens_to_ids("<q>")
