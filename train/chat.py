"""Conversations as documents: the tokenizer's own template turns messages into a context and an appendix.

In: a tokenizer and a list of messages. Out: the tokens before the last assistant turn (with the template's
generation prompt), and the tokens of that turn. The one decision taken here: the two parts are encoded apart,
cut where the prompt ends, since that is what the model reads when it is used: a prompt, then its own tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Chat = Callable[[Sequence[Mapping[str, Any]]], tuple[list[int], list[int]]]

# ShareGPT's names of who speaks.
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "assistant": "assistant",
    "system": "system",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
}


def turns(messages: Any) -> list[dict[str, Any]]:
    """Messages as `{"role", "content"}`, from this form or from ShareGPT's `{"from", "value"}`.

    Args:
        messages: the list that a data set's row holds; fields that are None are left out (parquet fills every
            message with all fields that any has).

    Returns:
        the messages, other fields (tool calls) as they were.

    Raises:
        ValueError: it is no list of messages in either form.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"wanted a list of messages, got {_shown(messages)}")
    made = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"message {number} is {_shown(message)}; wanted {{role, content}}")
        fields = {name: value for name, value in message.items() if value is not None}
        if "from" in fields and "role" not in fields:
            speaker = fields.pop("from")
            if speaker not in SHAREGPT_ROLES:
                raise ValueError(
                    f"message {number} is from {speaker!r}; known speakers: {', '.join(SHAREGPT_ROLES)}"
                )
            fields["role"] = SHAREGPT_ROLES[speaker]
            fields["content"] = fields.pop("value", None)
        if not isinstance(fields.get("role"), str):
            raise ValueError(f"message {number} has fields {sorted(message)}; wanted role and content")
        if fields.get("content") is None and "tool_calls" not in fields:
            raise ValueError(f"message {number} ({fields['role']}) has no content")
        made.append(fields)
    return made


def chat_of(tokenizer: Any) -> Chat:
    """The function that encodes conversations with this tokenizer's template.

    `(context, appendix)` with

        context  = template(messages before the last assistant turn, with the generation prompt)
        appendix = the rest of template(messages up to and with that turn)

    each encoded on its own, without further special tokens (the template writes them). What follows the last
    assistant turn is left out. A conversation without an assistant turn is all context. Some templates open
    the generation prompt with something that they leave out of past turns (`<think>`): there the context ends
    before the generation prompt, and the appendix begins with the turn's header.

    Args:
        tokenizer: of the frozen model; it may lack a template, which is an error only where one is needed.

    Returns:
        messages (as `turns` gives them) -> (context ids, appendix ids).
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def render(messages: Sequence[Mapping[str, Any]], prompt: bool) -> str:
        try:
            return str(
                tokenizer.apply_chat_template(
                    [{**message} for message in messages], tokenize=False, add_generation_prompt=prompt
                )
            )
        # Templates are programs: jinja's own errors, and TypeError, KeyError from inside them.
        except Exception as error:
            raise ValueError(
                f"the tokenizer's chat template refuses this conversation ({_what(error)}): "
                "roles must be those that the template knows: mostly system first, then user and assistant "
                "in turn"
            ) from error

    def chat(messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "the tokenizer has no chat template, which conversations need: take the instruction-tuned "
                "model, save a tokenizer with a template beside the weights, or give plain text"
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


def _what(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({type(value).__name__})"
