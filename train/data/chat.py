"""Encodes conversations with the tokenizer's own chat template: a context and an appendix.

The context is what precedes the last assistant turn (with the template's generation prompt), the appendix is
that turn. Each is encoded apart, as when the model is used: a prompt, then its own tokens.

A template that takes the day as `date_string` (Llama 3's) writes always the same one.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Messages, and the tools that the model may call -> (context ids, appendix ids).
Chat = Callable[[Sequence[Mapping[str, Any]], Sequence[Any]], tuple[list[int], list[int]]]


# The day that Llama 3's template writes where it is given none.
DAY = "26 Jul 2024"
# ShareGPT's names of who speaks.
SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bard", "bing", "assistant", "model", "function_call"), "assistant"),
    "system": "system",
    **dict.fromkeys(("observation", "function_response", "tool"), "tool"),
}


def turns(messages: Any) -> list[dict[str, Any]]:
    """Returns messages as `{"role", "content"}`, from this form or from ShareGPT's `{"from", "value"}`.

    Other fields (tool calls) stay as they were, with the nulls inside them. A field of the message itself
    that is null counts as not given, as in OpenAI's form. Only a null `content` stays: templates look at it.
    A content that is a list of text parts becomes one text.

    Raises:
        ValueError: it is no list of messages in either form, or a content has parts that are no text.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"wanted a list of messages, got {shown(messages)}")
    made = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"message {number} is {shown(message)}; wanted {{role, content}}")
        fields = {name: own for name, own in message.items() if own is not None or name == "content"}
        if "from" in fields and "role" not in fields:
            speaker = fields.pop("from")
            if speaker not in SHAREGPT_ROLES:
                raise ValueError(
                    f"message {number} is from {speaker!r}; known speakers: {', '.join(SHAREGPT_ROLES)}"
                )
            fields["role"] = SHAREGPT_ROLES[speaker]
            fields["content"] = fields.pop("value", None)
            calls = _calls(fields["content"]) if speaker == "function_call" else []
            if calls:
                fields |= {"content": "", "tool_calls": calls}
        if isinstance(fields.get("content"), list | tuple):
            fields["content"] = _joined(fields["content"], number)
        if not isinstance(fields.get("role"), str):
            raise ValueError(f"message {number} has fields {sorted(message)}; wanted role and content")
        if fields.get("content") is None and "tool_calls" not in fields:
            raise ValueError(f"message {number} ({fields['role']}) has no content")
        if (half := half_character(fields)) is not None:
            raise ValueError(f"message {number} holds {half}")
        made.append(fields)
    return made


def _joined(parts: Sequence[Any], number: int) -> str:
    """The text of OpenAI's content parts, with nothing between them, as in templates that take parts."""
    for place, part in enumerate(parts):
        where = f"part {place} of the content of message {number}"
        if not isinstance(part, Mapping) or "type" not in part:
            raise ValueError(f'{where} is {shown(part)}; wanted {{"type": "text", "text": ...}}')
        if part["type"] != "text":
            raise ValueError(
                f"{where} is of type {part['type']!r}, and only text can be read: leave the row out, or "
                "write the part as text"
            )
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{where} has the text {shown(part.get('text'))}; wanted a string")
    return "".join(part["text"] for part in parts)


def tools_of(value: Any) -> list[Any]:
    """Returns the tools of a conversation, from a list of their descriptions or its JSON text (ShareGPT's);
    ValueError: it is neither."""
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value) if value.strip() else []
        except ValueError as error:
            raise ValueError(f"tools is no JSON ({error}), got {shown(value)}") from error
    if found is None:
        return []
    if not isinstance(found, list | tuple) or not all(isinstance(tool, Mapping) for tool in found):
        raise ValueError(f"wanted tools as a list of descriptions (or its JSON text), got {shown(value)}")
    if (half := half_character(found)) is not None:
        raise ValueError(f"tools holds {half}")
    return list(found)


def half_character(value: Any) -> str | None:
    """Describes the first half of a surrogate pair without the other in the texts of a value: JSON can write
    it (`\\ud83d`), and no tokenizer reads it. None: none is there."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return (
                f"half of a character, \\u{ord(value[error.start]):04x} at place {error.start}: the text was "
                "cut inside of an emoji or the like. Write it again, or leave the row out"
            )
        return None
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    parts = value if isinstance(value, list | tuple) else ()
    return next(filter(None, map(half_character, parts)), None)


def _calls(value: Any) -> list[dict[str, Any]]:
    """ShareGPT's function calls, JSON text of one or of a list, as templates take them; else none."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return []
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, Mapping) and "name" in call for call in calls):
        return []
    return [
        {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments") or {}}}
        for call in calls
    ]


def chat_of(tokenizer: Any) -> Chat:
    """Returns the function that encodes conversations with this tokenizer's template.

        context  = template(messages before the last assistant turn, with the generation prompt)
        appendix = the rest of template(messages up to and with that turn)

    each encoded on its own, without further special tokens (the template writes them). Turns after the last
    assistant turn are left out. A conversation without an assistant turn is all context. Some templates open
    the generation prompt with something that they leave out of past turns (`<think>`): there the context ends
    before the generation prompt, and the appendix begins with the turn's header.

    Args:
        tokenizer: of the frozen model; it may lack a template, which is an error only where one is needed.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], prompt: bool) -> str:
        try:
            return str(
                tokenizer.apply_chat_template(
                    [{**message} for message in messages],
                    tools=list(tools) or None,
                    tokenize=False,
                    add_generation_prompt=prompt,
                    date_string=DAY,
                )
            )
        # Templates are programs: jinja's own errors, and TypeError, KeyError from inside them.
        except Exception as error:
            raise ValueError(
                f"the tokenizer's chat template refuses this conversation ({type(error).__name__}: "
                f"{error}): look at the fields of this row's messages beside those that the template names "
                "(tokenizer.chat_template); mostly roles are system, then user and assistant in turn, and "
                "contents text. Write the row so, or leave it out"
            ) from error

    def chat(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> tuple[list[int], list[int]]:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "the tokenizer has no chat template, which conversations need: take the instruction-tuned "
                "model, save a tokenizer with a template beside the weights, or give plain text"
            )
        if tools and render(messages, tools, False) == render(messages, (), False):
            raise ValueError(
                "the row has tools, and the tokenizer's chat template does not write them: take a model that "
                "calls tools, or leave them out with data.columns={messages: ...}"
            )
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            return encode(render(messages, tools, True)), []
        last = answers[-1]
        if last == 0:
            raise ValueError(
                "the only assistant turn is the first message, and nothing comes before it to keep or evict: "
                "leave the row out"
            )
        whole = render(messages[: last + 1], tools, False)
        for prompt in (True, False):
            context = render(messages[:last], tools, prompt)
            if whole.startswith(context):
                return encode(context), encode(whole[len(context) :])
        raise ValueError(
            "the tokenizer's chat template writes earlier turns differently once the last one is there, so "
            "no context can be cut off: give context, question and answer as text instead"
        )

    return chat


def shown(value: Any) -> str:
    """Returns the beginning of a value, and its type, for errors."""
    if isinstance(value, int) and abs(value) >= 2**64:
        return f"an integer of {value.bit_length()} bits"  # Python writes no more than 4300 digits
    text = repr(value)
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({type(value).__name__})"
