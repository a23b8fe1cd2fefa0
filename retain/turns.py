"""Finds the turns of a conversation in token ids, from a tokenizer's chat template.

No list of templates is kept. Probe conversations are rendered, one content at a time is replaced by others,
and what stays the same on both sides is the template's markup; a token that merges markup and content counts
as content. The result says which tokens are markup, to which turn each other token belongs, and which tokens
a policy protects.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor

Tokens = tuple[int, ...]
Gap = tuple[str, str, Tokens]

# Messages of each probe, and whether the template is asked for a generation prompt. `call` is an assistant's
# message that calls a tool, which some templates want before a tool's answer. Most templates refuse some.
_CONVERSATIONS: tuple[tuple[tuple[str, ...], bool], ...] = (
    (("user",), False),
    (("user",), True),
    (("user", "assistant"), False),
    (("user", "assistant", "user"), True),
    (("user", "assistant", "user", "assistant"), False),
    (("system",), False),
    (("system", "user", "assistant", "user"), True),
    (("user", "assistant", "tool"), False),
    (("user", "assistant", "tool"), True),
    (("user", "assistant", "tool", "tool", "assistant"), False),
    (("user", "call", "tool"), True),
    (("user", "call", "tool", "assistant", "user"), True),
)

# Contents of the probes by what stands at their borders: words hardly ever merge with markup, punctuation
# does with markup that is plain text, white space does with a marker's line break. No two begin or end alike.
_CONTENTS = {
    "word": ("Lantern seven", "orchard Bridge", "42 rivers", "pebbles 19"),
    "sign": ("(quiet) [harbour]", "?really!", '"maple," she said."', "- item;", "#tag:", "/path/"),
    "space": (" spaced ", "\nline\n", "\n\nparagraph\n\n", "\ttab\t"),
}

# Markers are looked for as each of these groups leaves them, so that a merged border costs a marker its
# border token and no more.
_GROUPS = (("word",), ("word", "sign"), ("word", "space"), ("word", "sign", "space"))

# Ordinary text, which any content may hold besides the words of the markup: no marker occurs in it.
_ORDINARY = ("a\nb", "a\n\nb", "a\n\n\nb", "a b", "a: b", "a:\nb", "a. b", "a, b", "a - b", "\n", "\n\n", ":")
_FORMS = ("{}", " {}", "\n{}", "a {} b", "({})", '"{}"', "{}.", "{},", "{}\n", "{}\n\n")

_PIN = (
    "Pin the spans that must stay instead (retain.protection.pinned_mask), or protect no turns (turns=false, "
    "turn_prefix=0, turn_suffix=0)."
)


@dataclass(frozen=True)
class TurnMarkers:
    """The token sequences that stand between the contents of a conversation.

    A role has several of each where tokens merge at a border, or where the template writes a turn differently
    by its place; of those that match, the union is markup. A sequence may be both: `[/INST]` ends a user's
    content and opens the assistant's.

    Args:
        headers: (role, tokens), what opens the content of a role's turn; `call` is an assistant's call of a
            tool.
        ends: (role, tokens), what closes it.
    """

    headers: tuple[tuple[str, Tokens], ...]
    ends: tuple[tuple[str, Tokens], ...]

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles whose header is known."""
        return tuple(dict.fromkeys(role for role, _ in self.headers))


@dataclass(frozen=True)
class TurnSpans:
    """Where the turns of each sequence are.

    Args:
        markup_BT: True on headers and ends.
        turn_BT: which turn's content a token belongs to, counted from 0 over the turns that have content; -1
            on markup, on padding, and on what stands in no turn.
        from_start_BT: tokens of the same content before this one; 0 outside of contents.
        to_stop_BT: tokens of the same content after this one; 0 outside of contents.
    """

    markup_BT: Bool[Tensor, "B T"]
    turn_BT: Int64[Tensor, "B T"]
    from_start_BT: Int64[Tensor, "B T"]
    to_stop_BT: Int64[Tensor, "B T"]


def turn_markers(tokenizer: Any) -> TurnMarkers:
    """Find the markup that a tokenizer's chat template writes between the contents of a conversation.

    Each probe conversation is rendered and tokenized; a content's place is the part that changes as that
    content is replaced. Between the contents `k` and `k + 1` stands `end + header`: an end is common to all
    continuations after a role, a header is the rest. Sequences that ordinary text may hold too (a role's name
    alone, a line break) are dropped.

    Args:
        tokenizer: anything with `apply_chat_template(messages, tokenize=False, add_generation_prompt=...)`
            and `encode(text, add_special_tokens=False)`, as the tokenizers of transformers.

    Returns:
        The markers of the roles that the template accepts.

    Raises:
        ValueError: if there is no chat template, it renders no conversation, or its markup cannot be told
            from ordinary text.
    """
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    if not hasattr(tokenizer, "apply_chat_template") or not getattr(tokenizer, "chat_template", True):
        raise ValueError(f"tokenizer {name!r} has no chat template, so the turns cannot be found. {_PIN}")
    contents = _contents(tokenizer)
    if len(contents["word"]) < 2:
        raise ValueError(
            f"tokenizer {name!r} does not know enough words to tell its chat template's markup from "
            f"contents. {_PIN}"
        )
    probes, refusals, texts = [], [], []
    for roles, prompt in _CONVERSATIONS:
        try:
            probe, text = _probe(tokenizer, roles, prompt, contents)
        except Exception as error:  # whatever the template raises where it refuses a role or an order
            refusals.append(f"{', '.join(roles)}: {type(error).__name__}: {error}")
            continue
        texts.append(text)
        if probe is not None:
            probes.append(probe)
    if not any("assistant" in probe.roles for probe in probes):
        raise ValueError(
            f"the chat template of tokenizer {name!r} renders no conversation of a user and an assistant "
            f"({'; '.join(refusals) or 'the contents do not appear'}). {_PIN}"
        )
    ordinary = _ordinary(tokenizer, texts)

    def distinct(tokens: Tokens) -> bool:
        return bool(tokens) and not any(_holds(text, tokens) for text in ordinary)

    def extra(tokens: Tokens, end: Tokens) -> bool:
        before = tokens[: len(tokens) - len(end)]
        return tokens[len(before) :] == end and bool(before) and not distinct(before)

    headers: dict[tuple[str, Tokens], None] = {}
    ends: dict[tuple[str, Tokens], None] = {}
    bos = getattr(tokenizer, "bos_token_id", None)
    for left, right in product(_GROUPS, _GROUPS):
        gaps = [gap for probe in probes for gap in probe.gaps(left, right)]
        found_headers, found_ends = _split(gaps, distinct, bos)
        headers.update(dict.fromkeys(found_headers))
        ends.update(dict.fromkeys(found_ends))
    # What one role's end has before another's, as the quotation mark that closes a tool's answer, must not be
    # taken from the other's content.
    reduced = {
        (
            role,
            min(
                (end for other, end in ends if other != role and extra(tokens, end)), key=len, default=tokens
            ),
        )
        for role, tokens in ends
    }
    markers = TurnMarkers(tuple(sorted(headers)), tuple(sorted(reduced)))
    for probe in probes:
        missed = probe.missed(markers)
        if missed:
            raise ValueError(
                f"the chat template of tokenizer {name!r} writes nothing between {missed} that ordinary text "
                f"could not hold, so the turns cannot be found. {_PIN}"
            )
    return markers


def turn_spans(
    markers: TurnMarkers, token_ids_BT: Int[Tensor, "B T"] | None, valid_BT: Bool[Tensor, "B T"]
) -> TurnSpans:
    """Find every turn of each sequence, also the last, unfinished one; padding is not read.

    A content begins after a header and lasts to the next marker, or to the end of the sequence.

    Raises:
        ValueError: if there are no token ids, as where embeddings were passed.
    """
    if token_ids_BT is None:
        raise ValueError(
            "turns are found from token ids, and there are none (embeddings were passed). Pass input_ids. "
            f"{_PIN}"
        )
    B, T = valid_BT.shape
    ids_BT = token_ids_BT.long().masked_fill(~valid_BT, -1)
    # How many markers cover a token, as differences: +1 where one begins, -1 after it.
    cover_BT1 = torch.zeros(B, T + 1, dtype=torch.long, device=ids_BT.device)
    opens_BT1 = torch.zeros_like(cover_BT1, dtype=torch.bool)
    headers = {tokens for _, tokens in markers.headers}
    for tokens in sorted(headers | {tokens for _, tokens in markers.ends}):
        length = len(tokens)
        if length > T:
            continue
        places = T - length + 1
        hit_BP = (ids_BT.unfold(-1, length, 1) == ids_BT.new_tensor(tokens)).all(-1)
        cover_BT1[:, :places] += hit_BP
        cover_BT1[:, length:] -= hit_BP.long()
        if tokens in headers:
            opens_BT1[:, length:] |= hit_BP
    markup_BT = cover_BT1.cumsum(-1)[:, :T] > 0
    plain_BT = valid_BT & ~markup_BT
    # A run of plain tokens is a content if a header ends where it begins.
    before_BT = torch.nn.functional.pad(plain_BT, (1, 0))[:, :-1]
    after_BT = torch.nn.functional.pad(plain_BT, (0, 1))[:, 1:]
    place_BT = torch.arange(T, device=ids_BT.device).expand(B, T)
    start_BT = place_BT.masked_fill(~(plain_BT & ~before_BT), -1).cummax(-1).values
    stop_BT = place_BT.masked_fill(~(plain_BT & ~after_BT), T).flip(-1).cummin(-1).values.flip(-1)
    content_BT = plain_BT & opens_BT1.gather(-1, start_BT.clamp_min(0))
    turn_BT = (content_BT & (place_BT == start_BT)).long().cumsum(-1) - 1
    return TurnSpans(
        markup_BT,
        turn_BT.masked_fill(~content_BT, -1),
        (place_BT - start_BT).masked_fill(~content_BT, 0),
        (stop_BT - place_BT).masked_fill(~content_BT, 0),
    )


def turn_mask(
    markers: TurnMarkers,
    token_ids_BT: Int[Tensor, "B T"] | None,
    valid_BT: Bool[Tensor, "B T"],
    *,
    turns: bool = True,
    turn_prefix: int = 0,
    turn_suffix: int = 0,
) -> Bool[Tensor, "B T"]:
    """Mask of the protected tokens of every turn; `pinned_BT` of `retain.protection.protected_mask`.

    Args:
        turns: whether the markup is protected.
        turn_prefix: first tokens of every turn's content.
        turn_suffix: last tokens of every turn's content; of an unfinished turn, the last that exist.

    Raises:
        ValueError: if there are no token ids, or a count is negative.
    """
    negative = [
        f"{key} is {value}, and must be 0 or more"
        for key, value in (("turn_prefix", turn_prefix), ("turn_suffix", turn_suffix))
        if value < 0
    ]
    if negative:
        raise ValueError(f"turns: {'; '.join(negative)}.")
    spans = turn_spans(markers, token_ids_BT, valid_BT)
    content_BT = spans.turn_BT >= 0
    mask_BT = content_BT & ((spans.from_start_BT < turn_prefix) | (spans.to_stop_BT < turn_suffix))
    return mask_BT | spans.markup_BT if turns else mask_BT


@dataclass(frozen=True)
class _Probe:
    """A rendered conversation, and where its contents are.

    Args:
        ids: its tokens.
        roles: of its contents, in the order in which they are rendered.
        places: of each content, by group of `_CONTENTS`: where it begins and ends at the earliest and latest.
        prompt: whether a generation prompt stands at its end.
    """

    ids: Tokens
    roles: tuple[str, ...]
    places: tuple[dict[str, tuple[int, int]], ...]
    prompt: bool

    def gaps(self, left: Sequence[str], right: Sequence[str]) -> Iterator[Gap]:
        """Yield (role before, role after, tokens between contents), with no role at the ends.

        Args:
            left: groups of contents that may stand on the left of a gap.
            right: on the right.
        """
        stops = [0, *(max(place[group][1] for group in left) for place in self.places)]
        starts = [*(min(place[group][0] for group in right) for place in self.places), len(self.ids)]
        before = ("", *self.roles)
        after = (*self.roles, "assistant" if self.prompt else "")
        for role, following, stop, start in zip(before, after, stops, starts, strict=True):
            yield role, following, self.ids[stop:start]

    def missed(self, markers: TurnMarkers) -> str:
        """The first two roles between whose contents no marker opens a turn, in words; empty if none.

        What a system message is folded into is one turn with it.
        """
        ids = torch.tensor([self.ids])
        turn = turn_spans(markers, ids, torch.ones_like(ids, dtype=torch.bool)).turn_BT[0].tolist()
        inside = [turn[place["word"][0]] for place in self.places]
        for (role, first), (following, second) in pairwise(zip(self.roles, inside, strict=True)):
            if "system" not in (role, following) and (first < 0 or second <= first):
                return f"a message of the {role} and one of the {following}"
        return ""


def _probe(
    tokenizer: Any, roles: Sequence[str], prompt: bool, contents: dict[str, tuple[str, ...]]
) -> tuple[_Probe | None, str]:
    """Render a conversation once for each content at each place; None if a content does not appear in it."""

    def render(fillings: Sequence[str]) -> tuple[Tokens, str]:
        messages = [_message(role, text) for role, text in zip(roles, fillings, strict=True)]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        return tuple(tokenizer.encode(text, add_special_tokens=False)), text

    base = [contents["word"][i % 2] for i in range(len(roles))]
    ids, text = render(base)
    places = []
    for place, own in enumerate(base):
        spans = {}
        for group, group_contents in contents.items():
            others = [
                render([*base[:place], other, *base[place + 1 :]])[0]
                for other in group_contents
                if other != own
            ]
            # A group whose contents the tokenizer does not know has nothing to say.
            begin = min((_shared(ids, other) for other in others), default=len(ids))
            end = max((len(ids) - _shared(ids[::-1], other[::-1]) for other in others), default=0)
            spans[group] = (begin, end)
        if spans["word"][0] >= spans["word"][1]:
            return None, text
        places.append(spans)
    order = sorted(range(len(roles)), key=lambda place: places[place]["word"])
    return _Probe(ids, tuple(roles[i] for i in order), tuple(places[i] for i in order), prompt), text


def _message(role: str, content: str) -> dict[str, Any]:
    """Make one message; all of its fields vary with its content."""
    number = f"{sum(content.encode()) * 7919 % 10**9:09d}"
    if role == "call":
        function = {"name": f"f{number}", "arguments": {"text": content}}
        call = {"type": "function", "id": number, "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if role == "tool":
        return {"role": role, "content": content, "name": f"f{number}", "tool_call_id": number}
    return {"role": role, "content": content}


def _contents(tokenizer: Any) -> dict[str, tuple[str, ...]]:
    """Probe contents that the tokenizer knows; if it has whole words only, words of its own."""
    unknown = getattr(tokenizer, "unk_token_id", None)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    known = {
        group: tuple(text for text in texts if (ids := encode(text)) and unknown not in ids)
        for group, texts in _CONTENTS.items()
    }
    if len(known["word"]) < 2 and hasattr(tokenizer, "get_vocab"):
        words = (word for word, idx in sorted(tokenizer.get_vocab().items()) if encode(word) == [idx])
        own = [word for _, word in zip(range(8), (word for word in words if word.isalnum()), strict=False)]
        pairs = [f"{first} {second}" for first, second in zip(own[::2], own[1::2], strict=False)]
        known["word"] += tuple(pairs[: len(_CONTENTS["word"])])
    return known


def _ordinary(tokenizer: Any, texts: Sequence[str]) -> list[Tokens]:
    """Tokenize ordinary text that holds each word of the markup."""
    words = dict.fromkeys(word for text in texts for word in re.findall(r"\w+", text))
    samples = [*_ORDINARY, *(form.format(word) for word in words for form in _FORMS)]
    return [tuple(tokenizer.encode(sample, add_special_tokens=False)) for sample in samples]


def _split(
    gaps: Sequence[Gap], distinct: Callable[[Tokens], bool], bos: int | None
) -> tuple[list[tuple[str, Tokens]], list[tuple[str, Tokens]]]:
    """Split the tokens between contents into the end of one turn and the header of the next.

    Args:
        gaps: (role before, role after, tokens).
        distinct: whether tokens can be told from ordinary text.
        bos: the token that begins a sequence, if there is one.
    """
    ends: dict[tuple[str, Tokens], None] = {}
    headers: dict[str, dict[Tokens, None]] = {}

    def opens(role: str, tokens: Tokens) -> None:
        if distinct(tokens):
            headers.setdefault(role, {})[tokens] = None

    # A role that a conversation may end with shows its end: what all that follows it has in common. Other
    # roles' ends are told by the header of the next turn, and so come later.
    last = {role for role, following, _ in gaps if role and not following}
    common = {role: _start_of_all([tokens for other, _, tokens in gaps if other == role]) for role in last}
    common = {role: tokens for role, tokens in common.items() if distinct(tokens)}
    ends.update(dict.fromkeys(common.items()))
    between = [gap for gap in gaps if gap[0] and gap[1]]
    for role, following, tokens in between:
        if role in last:
            rest = tokens[len(common.get(role, ())) :]
            opens(following, rest if distinct(rest) else tokens)
    for role, following, tokens in between:
        if role in last:
            continue
        known = [header for header in headers.get(following, ()) if tokens[-len(header) :] == header]
        rest = tokens[: len(tokens) - max(map(len, known), default=0)]
        if known and distinct(rest):
            ends[role, rest] = None
        elif distinct(tokens):
            ends[role, tokens] = None
            opens(following, tokens)
    later = {role: list(found) for role, found in headers.items()}
    for role, following, tokens in gaps:
        if following and not role:
            opens(following, _first_header(tokens, later.get(following, []), later, distinct, bos))
    return [(role, tokens) for role, found in headers.items() for tokens in found], list(ends)


def _first_header(
    tokens: Tokens,
    own: Sequence[Tokens],
    later: dict[str, list[Tokens]],
    distinct: Callable[[Tokens], bool],
    bos: int | None,
) -> Tokens:
    """Find the header before the first content (`tokens`), without the template's preamble and the BOS token.

    Args:
        own: the same role's headers later in a conversation.
        later: every role's.
        distinct: whether tokens can be told from ordinary text.
    """
    firsts = {header[0] for found in later.values() for header in found}
    if bos is not None and tokens[:1] == (bos,) and bos not in firsts:
        tokens = tokens[1:]
    same = [(_shared(tokens[::-1], header[::-1]), len(header)) for header in own]
    if found := [(shared, length) for shared, length in same if distinct(tokens[len(tokens) - shared :])]:
        # As long as the other, since its first token may have merged with what stands before it.
        return tokens[-max(found)[1] :]
    # A role that only ever comes first: its header has the shape of the others', and what follows that shape
    # is text which the template writes itself (a date, say), and belongs to the content.
    shapes = [
        (user[: _shared(user, assistant)], user[len(user) - _shared(user[::-1], assistant[::-1]) :])
        for user, assistant in product(later.get("user", ()), later.get("assistant", ()))
    ]
    if shapes := [(opening, closing) for opening, closing in shapes if opening and closing]:
        opening, closing = max(shapes, key=lambda shape: len(shape[0]) + len(shape[1]))
        begin = _find(tokens, opening, 0)
        stop = _find(tokens, closing, begin + len(opening)) if begin >= 0 else -1
        if stop >= 0 and distinct(shape := tokens[begin : stop + len(closing)]):
            return shape
    return tokens


def _shared(first: Tokens, second: Tokens) -> int:
    """Length of the common beginning of two sequences."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _start_of_all(sequences: Sequence[Tokens]) -> Tokens:
    """Common beginning of all sequences."""
    return sequences[0][: min(_shared(sequences[0], other) for other in sequences)]


def _find(text: Tokens, tokens: Tokens, begin: int) -> int:
    """First place of `tokens` in `text` from `begin` on; -1 if there is none."""
    places = range(begin, len(text) - len(tokens) + 1)
    return next((i for i in places if text[i : i + len(tokens)] == tokens), -1)


def _holds(text: Tokens, tokens: Tokens) -> bool:
    return _find(text, tokens, 0) >= 0
