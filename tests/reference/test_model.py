"""The reference model that comes with the package: its tokenizer takes any text."""

from retain.reference import load_tokenizer


def test_the_tokenizer_encodes_any_text() -> None:
    tokenizer = load_tokenizer()
    for text in ("def f(x):\n\treturn x", "Grüße, 你好 🙂", "\x00\x7f"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert tokenizer("<q> get name<a>")["input_ids"][0] == tokenizer.convert_tokens_to_ids("<q>")
