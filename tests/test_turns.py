"""Turns found from chat templates, against the places of contents in the rendered text.

The oracle knows no markers: it looks for each content in the rendered text, and asks the tokenizer's offsets
which tokens overlap it. Templates are written in the manner of well-known ones, tokenizers trained here.
"""

import json
from dataclasses import dataclass
from functools import cache
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from retain.protection import Protection, pinned_mask, protected_mask
from retain.turns import TurnMarkers, turn_markers, turn_mask, turn_spans
from tests.chat import (
    CHATML,
    KINDS,
    MERGED,
    PHI3,
    SENTENCES,
    SYSTEM,
    TEMPLATES,
    TOOLS,
    backend,
    chat_tokenizer,
)
from tests.refused import refused


@cache
def _markers(template: str, kind: str) -> TurnMarkers:
    return turn_markers(chat_tokenizer(template, kind))


@dataclass
class Rendered:
    """A conversation's ids, and what the oracle says of each: its turn, None for markup."""

    ids: list[int]
    turns: list[int | None]


def _rendered(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict],
    prompt: bool,
    system: tuple[str, str] | None = None,
) -> Rendered:
    """Render; `system` is the markup around a system turn into which the template writes by itself."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ranges, begin = [], 0
    if system is not None:
        ranges.append((begin := text.index(system[0]) + len(system[0]), begin := text.index(system[1])))
        messages = messages[messages[0]["role"] == "system" :]
    for message in messages:
        # A tool's answer may be written as JSON, with its line breaks escaped.
        forms = (message["content"], json.dumps(message["content"])[1:-1])
        content = next(form for form in forms if form in text)
        begin = text.index(content, begin)
        # The quotation mark that closes it is ordinary text, and counts as content.
        stop = begin + len(content) + (message["role"] == "tool" and text[begin + len(content)] == '"')
        ranges.append((begin, begin := stop))
    turns = []
    for start, stop in coded["offset_mapping"]:
        owners = [i for i, (first, last) in enumerate(ranges) if start < last and stop > first]
        turns.append(owners[0] if owners else None)
    return Rendered(coded["input_ids"], turns)


def _batch(rows: list[Rendered], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(row.ids) for row in rows)
    ids = torch.tensor([[pad] * (width - len(row.ids)) + row.ids for row in rows])
    lengths = torch.tensor([len(row.ids) for row in rows])
    return ids, torch.arange(width) >= width - lengths[:, None]


def _conversation(texts: list[str], first: str | None, tools: bool = False) -> list[dict]:
    """Alternating turns, numbered so that each content is found once, after a system message if any."""
    roles = ["user", "assistant", "tool", "assistant"] if tools else ["user", "assistant"]
    start = [] if first is None else [{"role": "system", "content": f"{first} 00"}]
    return start + [
        {"role": roles[i % len(roles)], "content": f"{text} {i // 10} {i % 10}"}
        for i, text in enumerate(texts)
    ]


def _own(template: str, tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Ids that begin a sequence or end it, and are no part of a turn's markup."""
    begins = {tokenizer.bos_token_id} if template in ("llama3", "gemma", "mistral") else set()
    return begins | ({tokenizer.eos_token_id} if template == "phi3" else set())


@st.composite
def _conversations(draw: st.DrawFn, template: str) -> tuple[list[dict], bool]:
    texts = draw(st.lists(st.sampled_from(SENTENCES), min_size=1, max_size=10))
    first = draw(st.none() | st.sampled_from(SENTENCES)) if template in SYSTEM else None
    return _conversation(texts, first, template in TOOLS and draw(st.booleans())), draw(st.booleans())


@pytest.mark.parametrize(
    ("template", "kind"), [pair for pair in product(TEMPLATES, KINDS) if pair not in MERGED]
)
def test_turns_are_where_the_text_has_them(template, kind):
    tokenizer, markers = chat_tokenizer(template, kind), _markers(template, kind)
    system = {
        "llama3": ("<|head|>system<|/head|>\n\n", "<|eot|>"),
        "qwen": ("<|im_start|>system\n", "<|im_end|>"),
    }.get(template)

    @settings(deadline=None, max_examples=15)
    @given(
        st.lists(_conversations(template), min_size=1, max_size=3),
        st.booleans(),
        st.integers(0, 3),
        st.integers(0, 3),
    )
    def check(batch, turns, prefix, suffix):
        rows = [_rendered(tokenizer, messages, prompt, system) for messages, prompt in batch]
        ids, valid = _batch(rows, tokenizer.pad_token_id)
        found = turn_spans(markers, ids, valid)
        mask = turn_mask(markers, ids, valid, turns=turns, turn_prefix=prefix, turn_suffix=suffix)
        own = _own(template, tokenizer)
        for row in range(len(batch)):
            pad = ids.shape[1] - len(rows[row].ids)
            wanted = rows[row].turns
            got = found.turn_BT[row].tolist()
            assert got[:pad] == [-1] * pad and not mask[row, :pad].any()
            for i, turn in enumerate(wanted):
                where = tokenizer.convert_ids_to_tokens(rows[row].ids)[max(0, i - 4) : i + 4]
                assert got[pad + i] == (-1 if turn is None else turn), (i, where)
                inside = [j for j, other in enumerate(wanted) if other == turn]
                if turn is None:
                    if rows[row].ids[i] not in own:
                        assert bool(found.markup_BT[row, pad + i]), (i, where)
                        assert bool(mask[row, pad + i]) is turns, (i, where)
                else:
                    ends = i - inside[0] < prefix or inside[-1] - i < suffix
                    assert bool(mask[row, pad + i]) is ends, (i, where)

    check()


@st.composite
def _cases(draw):
    """Random markers over few ids, so that they overlap, and random sequences in which they are common."""
    tokens = st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple)
    pairs = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), tokens), max_size=3).map(tuple)
    rows = draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=20), min_size=1, max_size=3))
    return draw(pairs), draw(pairs), rows


def _naive(markers: TurnMarkers, ids: list[int]) -> tuple[list[bool], list[list[int]]]:
    """Markup, and the places of each content, token by token."""
    markup, opened = [False] * len(ids), set()
    for is_header, pairs in ((True, markers.headers), (False, markers.ends)):
        for _, tokens in pairs:
            for i in range(len(ids) - len(tokens) + 1):
                if all(ids[i + j] == token for j, token in enumerate(tokens)):
                    for j in range(len(tokens)):
                        markup[i + j] = True
                    if is_header:
                        opened.add(i + len(tokens))
    contents: list[list[int]] = []
    inside = False
    for i in range(len(ids)):
        if markup[i]:
            inside = False
        elif inside:
            contents[-1].append(i)
        elif i in opened:
            contents.append([i])
            inside = True
    return markup, contents


@settings(deadline=None, max_examples=200)
@given(_cases(), st.booleans(), st.integers(0, 4), st.integers(0, 4))
def test_spans_and_mask_agree_with_a_loop_over_tokens(case, turns, prefix, suffix):
    headers, ends, rows = case
    markers = TurnMarkers(headers, ends)
    # The padding is a marker's own token, and must not be read.
    ids, valid = _batch([Rendered(row, []) for row in rows], 0)
    spans = turn_spans(markers, ids, valid)
    mask = turn_mask(markers, ids, valid, turns=turns, turn_prefix=prefix, turn_suffix=suffix)
    for row, own in enumerate(rows):
        pad = ids.shape[1] - len(own)
        markup, contents = _naive(markers, own)
        assert spans.markup_BT[row].tolist() == [False] * pad + markup
        turn = [-1] * len(own)
        wanted = [turns and here for here in markup]
        for number, places in enumerate(contents):
            for k, i in enumerate(places):
                turn[i] = number
                wanted[i] = k < prefix or len(places) - 1 - k < suffix
        assert spans.turn_BT[row].tolist() == [-1] * pad + turn
        assert mask[row].tolist() == [False] * pad + wanted


@pytest.mark.parametrize("template", TEMPLATES)
def test_contents_that_merge_with_markup_are_found(template):
    """Every turn is found for any border of its content, and no inner token of it is markup."""
    tokenizer, markers = chat_tokenizer(template, "bytes"), _markers(template, "bytes")
    edges = ["{}", " {}", "\n{}\n", "\n\n{}\n\n", "({})", '"{}"', "/{}?", "[{}]", "- {};", "{}. "]
    for edge in edges:
        texts = [edge.format(f"{SENTENCES[i % 7]} {i}") for i in range(6)]
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = torch.tensor([coded["input_ids"]])
        spans = turn_spans(markers, ids, torch.ones_like(ids, dtype=torch.bool))
        seen: list[int] = []
        for own in texts:
            begin = text.index(own.strip())
            stop = begin + len(own.strip())
            inside = [i for i, (a, b) in enumerate(coded["offset_mapping"]) if a < stop and b > begin]
            turns = set(spans.turn_BT[0, inside].tolist())
            assert len(turns) == 1 and -1 not in turns, (edge, own)
            seen += turns
        assert len(set(seen)) == len(texts), edge


@pytest.mark.parametrize("kind", ["words", "bytes"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_words_of_the_markup_are_no_markup(template, kind):
    tokenizer, markers = chat_tokenizer(template, kind), _markers(template, kind)
    text = "user assistant\nsystem\nmodel\nuser\n\n INST (INST) SYS tool.\nassistant, user: model:\nipython"
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    assert not turn_mask(markers, ids, torch.ones_like(ids, dtype=torch.bool)).any()


def test_the_markers_of_chatml():
    tokenizer, markers = chat_tokenizer("chatml", "words"), _markers("chatml", "words")

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    roles = ("assistant", "system", "tool", "user")
    assert markers.headers == tuple((role, ids(f"<|im_start|>{role}\n")) for role in roles)
    assert markers.ends == tuple((role, ids("<|im_end|>\n")) for role in roles)
    assert markers.roles == roles
    assert hash(markers) == hash(turn_markers(tokenizer))


def test_a_role_that_only_comes_first_has_neither_the_beginning_nor_the_next_header():
    template = "<|bos|>{% if messages[-1].role == 'system' %}{{ raise_exception('alone') }}{% endif %}" + PHI3
    tokenizer, markers = chat_tokenizer(template, "words"), _markers(template, "words")

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    assert [tokens for role, tokens in markers.headers if role == "system"] == [ids("<|system|>\n")]
    assert [tokens for role, tokens in markers.ends if role == "system"] == [ids("<|end|>\n")]


def test_a_folded_system_message_is_a_turn_and_a_text_of_the_template_is_a_content():
    tokenizer, markers = chat_tokenizer("llama2", "bytes"), _markers("llama2", "bytes")
    row = _rendered(tokenizer, _conversation(SENTENCES[:2], SENTENCES[2]), False)
    ids, valid = _batch([row], 0)
    assert turn_spans(markers, ids, valid).turn_BT.max() == 2
    # The date of the system turn differs from day to day, so it may be no part of a marker.
    date = set(chat_tokenizer("llama3", "words").encode("date July", add_special_tokens=False)[::2])
    assert not any(date & set(tokens) for _, tokens in _markers("llama3", "words").headers)


def test_a_tools_closing_quotation_mark_is_not_taken_from_other_contents():
    tokenizer, markers = chat_tokenizer("llama3", "bytes"), _markers("llama3", "bytes")
    messages = [{"role": "user", "content": 'What "The model"'}]
    row = _rendered(tokenizer, messages, True)
    ids, valid = _batch([row], 0)
    found = turn_spans(markers, ids, valid).turn_BT[0].tolist()
    assert [i for i, turn in enumerate(found) if turn == 1] == [i for i, t in enumerate(row.turns) if t == 0]


def test_a_template_whose_tools_follow_calls_only():
    """Tools are refused without a call before them, and their answers carry the call's own id."""
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{% if not messages[loop.index0 - 1].tool_calls and "
        "messages[loop.index0 - 1].role != 'tool' %}{{ raise_exception('no call') }}{% endif %}"
        "<|tool|>{{ m.content }}, for {{ m.tool_call_id }}<|end|>{% else %}<|{{ m.role }}|>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<think>{{ c.function.name }} {{ c.id }}</think>{% endfor %}<|end|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer, markers = chat_tokenizer(template, "bytes"), _markers(template, "bytes")
    assert "tool" in markers.roles
    call = {"id": "7", "type": "function", "function": {"name": "look", "arguments": {}}}
    messages = [
        {"role": "user", "content": SENTENCES[0]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": SENTENCES[3], "tool_call_id": "7", "name": "look"},
        {"role": "assistant", "content": SENTENCES[5]},
    ]
    ids = torch.tensor([tokenizer.encode(tokenizer.apply_chat_template(messages, tokenize=False))])
    spans = turn_spans(markers, ids, torch.ones_like(ids, dtype=torch.bool))
    assert spans.turn_BT.max() == 3
    first = tokenizer.decode(ids[0, spans.turn_BT[0] == 2])
    assert first.startswith(SENTENCES[3])


def test_turns_and_pinned_spans_are_protected_within_the_budget():
    tokenizer, markers = chat_tokenizer("gemma", "bytes"), _markers("gemma", "bytes")
    rows = [_rendered(tokenizer, _conversation(SENTENCES[: n + 1], None), True) for n in (0, 4, 6)]
    ids, valid = _batch(rows, tokenizer.pad_token_id)
    protection = Protection(0, 0.0, 0.0, turns=True, turn_prefix=2, turn_suffix=1)
    assert protection.reads_turns and not Protection().reads_turns
    turns = turn_mask(markers, ids, valid, turns=True, turn_prefix=2, turn_suffix=1)
    pinned = pinned_mask([(3, 9)], valid)
    union = (turns | pinned) & valid
    counts = union.sum(-1).tolist()
    assert torch.equal(protected_mask(protection, valid, counts, pinned_BT=turns | pinned), union)
    with pytest.raises(
        ValueError, match=f"sequence 2 .* 1 fewer than the {counts[2]} protected .*0 at the ends"
    ):
        protected_mask(protection, valid, [*counts[:2], counts[2] - 1], pinned_BT=turns | pinned)


def test_what_cannot_be_found_is_an_error_that_says_what_to_do():
    refused("has no chat template.*[Pp]in the spans", turn_markers, object())
    tokenizer = chat_tokenizer("chatml", "bytes")
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(backend("bytes")))
    refused("has no chat template.*[Pp]in the spans", turn_markers, plain)
    plain.chat_template = "{{ raise_exception('never') }}"
    refused(r"renders no conversation .*never.*Pin the spans", turn_markers, plain)
    plain.chat_template = "{% for m in messages %}hello{% endfor %}"
    refused(r"renders no conversation .*contents do not appear.*Pin the spans", turn_markers, plain)
    plain.chat_template = "{% for m in messages %}{{ m.content }}\n\n{% endfor %}"
    refused(r"nothing between a message of the user and one of the assistant", turn_markers, plain)
    # A role's name alone is what contents may hold too.
    plain.chat_template = "{% for m in messages %}{{ m.role }}\n{{ m.content }}\n{% endfor %}"
    refused(r"that ordinary text could not hold.*Pin the spans", turn_markers, plain)
    ignorant = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    words = PreTrainedTokenizerFast(tokenizer_object=ignorant, unk_token="<unk>", chat_template=CHATML)
    refused(r"does not know enough words.*Pin the spans", turn_markers, words)
    markers = turn_markers(tokenizer)
    with pytest.raises(
        ValueError, match=r"there are none \(embeddings were passed\).*input_ids.*Pin the spans"
    ):
        turn_spans(markers, None, torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"turn_prefix is -1.*turn_suffix is -2"):
        turn_mask(markers, None, torch.ones(1, 3, dtype=torch.bool), turn_prefix=-1, turn_suffix=-2)


@pytest.mark.parametrize(("template", "kind"), MERGED)
def test_markup_that_always_merges_with_contents_is_an_error(template, kind):
    with pytest.raises(ValueError, match="nothing between a message of the user and one of the assistant"):
        turn_markers(chat_tokenizer(template, kind))
