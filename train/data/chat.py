"""Encodes conversations with the tokenizer's own chat template: a context and an appendix.

The context is what precedes the last assistant turn (with the template's generation prompt), the appendix is
that turn. Each is encoded apart, as when the model is used: a prompt, then its own tokens.

A template that takes the day as `date_string` (Llama 3's) writes always the same one.
"""

from collections.abc import Callable, Mapping, Sequence
from reprlib import repr as shown
from typing import Any

# Messages -> (context ids, appendix ids).
Chat = Callable[[Sequence[Mapping[str, Any]]], tuple[list[int], list[int]]]
# The day that Llama 3's template writes where it is given none.
DAY = "26 Jul 2024"


def turns(messages: Any) -> list[dict[str, Any]]:
    """Returns messages as `{"role", "content"}`, both text; other fields stay, but for those that are null.
    ValueError: it is no list of such messages, or one calls a tool."""
    made = []
    for number, message in enumerate(messages if isinstance(messages, list | tuple) else ()):
        fields = {**message} if isinstance(message, Mapping) else {}
        fields = {name: value for name, value in fields.items() if value is not None}
        texts = isinstance(fields.get("role"), str) and isinstance(fields.get("content"), str)
        if not texts or fields.get("tool_calls"):
            raise ValueError(
                f"message {number} is {shown(message)}; wanted role and content as text, no tool calls"
            )
        made.append(fields)
    if not made:
        raise ValueError(f"wanted a list of messages, got {shown(messages)}")
    return made


def chat_of(tokenizer: Any) -> Chat:
    """Returns the function that encodes conversations with this tokenizer's template.

        context  = template(messages before the last assistant turn, with the generation prompt)
        appendix = the rest of template(messages up to and with that turn)

    each encoded on its own, without further special tokens (the template writes them). Turns after the last
    assistant turn are left out. A conversation without an assistant turn is all context. Some templates open
    the generation prompt with something that they leave out of past turns (`<think>`): there the context ends
    before the generation prompt, and the appendix begins with the turn's header.

    The tokenizer may lack a template, which is an error only where one is needed.
    """

    def encode(text: str) -> list[int]:
        text.encode()  # half of a surrogate pair, which JSON can hold, is an error that says where
        return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def render(messages: Sequence[Mapping[str, Any]], prompt: bool) -> str:
        try:
            return str(
                tokenizer.apply_chat_template(
                    [{**message} for message in messages],
                    tokenize=False,
                    add_generation_prompt=prompt,
                    date_string=DAY,
                )
            )
        # Templates are programs: jinja's own errors, and TypeError, KeyError from inside them.
        except Exception as error:
            raise ValueError(
                f"the tokenizer's chat template refuses this conversation ({type(error).__name__}: "
                f"{error}): mostly roles are system, then user and assistant in turn. Write the row so, or "
                "leave it out"
            ) from error

    def chat(messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "the tokenizer has no chat template, which conversations need: take the instruction-tuned "
                "model, or give plain text"
            )
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            return encode(render(messages, True)), []
        last = answers[-1]
        if last == 0:
            raise ValueError(
                "the only assistant turn is the first message, and nothing comes before it to keep or evict: "
                "leave the row out"
            )
        whole = render(messages[: last + 1], False)
        for prompt in (True, False):
            context = render(messages[:last], prompt)
            if whole.startswith(context):
                return encode(context), encode(whole[len(context) :])
        raise ValueError(
            "the tokenizer's chat template writes earlier turns differently once the last one is there, so "
            "no context can be cut off: give context, question and answer as text instead"
        )

    return chat
