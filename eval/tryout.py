"""`retain try`: one question on a text, answered from the full cache and from a tenth of it.

    retain try [--text FILE --question QUESTION] [--model NAME] [--gates FOLDER] [--keep-ratio 0.1]

The text is read and evicted from before the question is known. What each policy answers is printed beside
what its cache holds, and a page shows the text with every token shaded by the share of heads that keep it.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from retain.eval.diagnose.documents import opening_of
from retain.eval.run.answers import respond
from retain.eval.run.cells import positions_held
from retain.eval.tasks.rendering import end_ids_of, frame_of
from retain.eval.tryout_arguments import parser
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from retain.models.named import load
from retain.process.command import command
from retain.process.extras import require

# What stands beside the gates' policy: the method that most compare with, and one that keeps unlike keys.
BESIDE = ("snapkv", "keydiff")
# The policy of `retain.Cache` where none is named.
DEFAULT = signature(Cache).parameters["policy"].default
TEXT = Path(__file__).parent / "report" / "template" / "try.txt"
QUESTION = "What is the registration number of the ferry?"
BEGINS = "The registration number of the ferry is"
# The share of heads at which a token's ground is darkest.
DARKEST = 0.5
ANSWER_TOKENS = 24


@dataclass(frozen=True)
class Asked:
    """A text and a question in the tokens of a model.

    Attributes:
        context_ids: what is read, and evicted from.
        tail_ids: what comes afterwards: the question, and how the answer begins.
        pieces: of the text, one a token of the context; empty where a chat template stands.
        end_ids: tokens that end an answer.
    """

    context_ids: tuple[int, ...]
    tail_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    end_ids: tuple[int, ...]


@dataclass(frozen=True)
class Said:
    """What a policy answered, the bytes that it answered from, and of each token of the context how many
    heads of how many hold it."""

    policy: str
    answer: str
    bytes_held: int
    kept: tuple[int, ...]
    of: int


def put(text: str, question: str, begins: str, tokenizer: Any) -> Asked:
    """Put a text and a question into the tokens of a model, in its chat template if it has one."""
    before, after = "", "\n"
    begin: tuple[int, ...] = ()
    if getattr(tokenizer, "chat_template", None) is not None:
        frame = frame_of(tokenizer)
        before, after = frame.before, frame.after
    else:
        begin = opening_of(tokenizer)
    context = before + text
    read = tokenizer(context, add_special_tokens=False, return_offsets_mapping=True)
    pieces, shown = [""] * len(begin), len(before)
    for _, stop in read["offset_mapping"]:  # a character of several tokens belongs to the first
        pieces.append(context[shown:stop] if stop > shown else "")
        shown = max(shown, stop)
    tail = tokenizer(f"\n{question}\n{after}{begins}", add_special_tokens=False)["input_ids"]
    return Asked((*begin, *read["input_ids"]), tuple(tail), tuple(pieces), end_ids_of(tokenizer))


@torch.inference_mode()
def answer(model: Any, tokenizer: Any, asked: Asked, policy: str | None, **how: Any) -> Said:
    """Read a text, evict, and answer.

    Args:
        policy: None: the full cache.
        **how: budget and gates, as `retain.Cache` takes them.
    """
    device = model.get_input_embeddings().weight.device
    cache = Cache(model, policy=policy, **how)
    context_1T = torch.tensor([asked.context_ids], device=device)
    cache.prefill(context_1T)
    total = cache.report().total
    heads = [head for layer in positions_held(cache, 0) for head in layer]
    kept_T = torch.zeros(len(asked.context_ids), dtype=torch.int64)
    for positions in heads:
        kept_T[positions.cpu()] += 1
    ids_1T = torch.tensor([asked.context_ids + asked.tail_ids], device=device)
    how_long: dict[str, Any] = {"new_tokens": ANSWER_TOKENS, "end_ids": asked.end_ids}
    (said,) = respond(model, cache, ids_1T, torch.ones_like(ids_1T), **how_long)
    text = " ".join(tokenizer.decode(list(said.tokens), skip_special_tokens=True).split())
    return Said(policy or "full cache", text, total.bytes_held, tuple(kept_T.tolist()), len(heads))


def lines_of(said: Sequence[Said], begins: str, keep_ratio: float) -> list[str]:
    """The answers as plain lines."""
    wide = max(len(one.policy) for one in said)
    lines = []
    for one in said:
        share = "all" if one is said[0] else f"{keep_ratio:.0%}"
        held = f"{one.bytes_held / 2**20:6.1f} MiB"
        lines.append(
            f"  {one.policy:<{wide}}  {share:>4}  {held}  {textwrap.shorten(f'{begins} {one.answer}', 96)}"
        )
    return lines


def page(asked: Asked, said: Sequence[Said], question: str, begins: str, title: str) -> str:
    """The page: the answers, and the text under each policy."""
    require("eval", "jinja2", what="the page of `retain try`")
    from jinja2 import Environment

    folder = files("retain.eval.report") / "template"
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((folder / "try.html.j2").read_text(encoding="utf-8"))
    shown = [
        {
            "policy": one.policy,
            "answer": f"{begins} {one.answer}".strip(),
            "mib": f"{one.bytes_held / 2**20:.1f}",
            "tokens": [
                (piece, f"{min(1.0, kept / one.of / DARKEST):.2f}", kept)
                for piece, kept in zip(asked.pieces, one.kept, strict=True)
                if piece
            ],
            "of": one.of,
        }
        for one in said
    ]
    css = (folder / "report.css").read_text(encoding="utf-8")
    return template.render(title=title, question=question, shown=shown, css=css, full=shown[0])


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Answers the question from the full cache and under each policy; prints, and writes the page."""
    given = parser().parse_args(arguments)
    if (given.text is None) != (given.question is None):
        raise ValueError("--text and --question go together: pass both, or none for the text that ships.")
    own = given.text is not None
    text = (given.text if own else TEXT).read_text(encoding="utf-8").strip()
    question = given.question if own else QUESTION
    begins = (given.begins or "") if own else BEGINS
    model, tokenizer = load(given.model, dtype=given.dtype)
    if tokenizer is None:
        raise ValueError(f"model={given.model!r} has no tokenizer, and a text needs one.")
    attach(model.to(given.device))
    asked = put(text, question, begins, tokenizer)
    count = len(asked.context_ids)
    print(f"{count:,} tokens are read and evicted from; then comes the question: {question}")
    gates = {} if given.gates is None else {"gates": given.gates}
    default = given.policy or DEFAULT
    Cache(model, policy=default, keep_ratio=given.keep_ratio, **gates)  # refused before anything is read
    given.out.parent.mkdir(parents=True, exist_ok=True)
    said = [answer(model, tokenizer, asked, None)]
    said += [answer(model, tokenizer, asked, name, keep_ratio=given.keep_ratio) for name in BESIDE]
    said.append(answer(model, tokenizer, asked, default, keep_ratio=given.keep_ratio, **gates))
    print("\n".join(lines_of(said, begins, given.keep_ratio)))
    title = f"{given.keep_ratio:.0%} of a cache: what is kept, what is answered"
    given.out.write_text(page(asked, said, question, begins, title), encoding="utf-8")
    print(f"Page: {given.out} (each token shaded by the share of heads that keep it)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
