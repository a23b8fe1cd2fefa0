"""Answers: generated greedily from a cache, cut at an end token, scored, and written as rows.

In: a cache that holds a context, and what is asked behind it. Out: answers, and rows. The one decision taken
here: an answer is what comes before the first end token; one that holds nothing is a null, whose score is 0
and which is counted. What a checkpoint says of generation (penalties, suppressed tokens, sampling) is set
aside: the likeliest token is taken, whoever answers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import GenerationConfig

from retain.eval.config import CompareConfig, Line
from retain.eval.run.evaluated_model import Unit
from retain.eval.run.results_store import Reference, Row, tokens_sha
from retain.eval.tasks.suite import Item, Suite

# Stands where a shorter context has nothing; masked, so that it matters nowhere.
PAD = 0


@dataclass(frozen=True)
class Answer:
    """What was generated for one item.

    Attributes:
        tokens: Up to an end token.
        ended: Whether one came.
    """

    tokens: tuple[int, ...]
    ended: bool = False

    @property
    def num_read(self) -> int:
        """Generated tokens that were read: all but the last, which nothing came after."""
        return max(0, self.num_made - 1)

    @property
    def num_made(self) -> int:
        """Generated tokens, one a forward; the one that ended the answer is among them."""
        return len(self.tokens) + int(self.ended)


@dataclass(frozen=True)
class Held:
    """What one item holds in one cell; entries over all layers and KV heads.

    Attributes:
        before: (held, seen) before every forward of the answer, the first of which reads the question; there
            may be more than the answer has tokens.
        bytes_beside: As in `Row`.
    """

    kept_entries: int
    seen_entries: int
    peak_entries: int
    bytes_held: int
    bytes_full: int
    needles_kept: float | None = None
    before: tuple[tuple[int, int], ...] = ()
    bytes_beside: int = 0

    def attended_ratio(self, answer: Answer) -> float | None:
        """Mean held / seen before the forwards that made an answer; None where they were not counted."""
        shares = [held / seen for held, seen in self.before[: answer.num_made]]
        return sum(shares) / len(shares) if shares else None


def padded(rows: Sequence[Sequence[int]]) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Token ids, left-padded to the longest, and the mask that says which are real."""
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def respond(
    model: Any,
    cache: Any,
    input_ids: Int[Tensor, "N T"],
    attention_mask: Int[Tensor, "N T"],
    *,
    new_tokens: int,
    end_ids: Sequence[int] = (),
    watch: Any = None,
) -> list[Answer]:
    """Generate greedily: of every forward the likeliest token, whatever the checkpoint's own
    `generation_config` asks for (`generate` fills what it is not told from there).

    Args:
        model: Attached.
        cache: What the cache has not seen of the ids is read first.
        input_ids: Context and question of each sequence, left-padded.
        attention_mask: 1 on tokens, 0 on padding.
        new_tokens: Most tokens to generate; without end tokens, exactly so many.
        end_ids: Tokens that end an answer.
        watch: Called behind every forward, as a stopping criterion of transformers.
    """
    ends = {"eos_token_id": list(end_ids)} if end_ids else {"eos_token_id": model.config.eos_token_id}
    least = {} if end_ids else {"min_new_tokens": new_tokens}
    with neutral(model):
        output = model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=cache,
            generation_config=GenerationConfig(
                max_new_tokens=new_tokens,
                do_sample=False,
                use_cache=True,
                pad_token_id=PAD,
                **least,
                **ends,
            ),
            **({} if watch is None else {"stopping_criteria": [watch]}),
        )
    return [cut(tokens, end_ids) for tokens in output[:, input_ids.shape[1] :].tolist()]


@contextmanager
def neutral(model: Any) -> Iterator[None]:
    """A model whose `generation_config` says nothing, until this ends."""
    before = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before


def cut(tokens: Sequence[int], end_ids: Sequence[int]) -> Answer:
    """The answer in what was generated: the tokens before the first that ends it."""
    for place, token in enumerate(tokens):
        if token in end_ids:
            return Answer(tuple(tokens[:place]), ended=True)
    return Answer(tuple(tokens))


def make_row(
    config: CompareConfig,
    suite: Suite,
    unit: Unit,
    *,
    index: int,
    item: Item,
    question: int,
    regime: str,
    line: Line,
    budget: float,
    held: Held,
    answer: Answer,
    gate_bytes: int,
    gates: str = "",
    trained: bool = False,
) -> Row:
    """Score one answer."""
    task, asked = suite.tasks[unit.task], item.asked[question]
    text = "" if asked.text is None else asked.text(answer.tokens)
    null = not answer.tokens or (asked.text is not None and not text.strip())
    exact, partial = (0.0, 0.0) if null else map(float, asked.score(answer.tokens))
    return Row(
        run=config.run,
        unit=unit.key,
        unit_rows=0,  # not known before the unit is whole
        seed=unit.seed,
        task=unit.task,
        family=task.family,
        item=index,
        question=question,
        regime=regime,
        policy=line.name,
        base_policy=line.policy,
        protection=line.protection,
        budget=float(budget),
        keep_ratio=held.kept_entries / held.seen_entries,
        score=exact if task.primary == "exact" else partial,
        exact=exact,
        partial=partial,
        null=null,
        ended=answer.ended,
        num_prompt=len(item.context_ids) + len(asked.question_ids),
        num_generated=len(answer.tokens),
        kept_entries=held.kept_entries,
        seen_entries=held.seen_entries,
        peak_entries=held.peak_entries,
        bytes_held=held.bytes_held,
        bytes_full=held.bytes_full,
        gate_bytes=gate_bytes,
        tokens=answer.tokens,
        tokens_sha=tokens_sha(answer.tokens),
        text=text,
        about={**item.about, **asked.about},
        needles_kept=held.needles_kept,
        attended_ratio=held.attended_ratio(answer),
        bytes_beside=held.bytes_beside,
        gates=gates,
        trained=trained,
    )


def needle_share(hits: Sequence[int], heads: Sequence[int], num_tokens: int) -> float:
    """Share of a needle's entries that are held: mean over heads, then layers.

    Args:
        hits: Of each layer, entries held over its heads.
        heads: KV heads of each layer.
        num_tokens: Of the needle.
    """
    shares = [own / (H * num_tokens) for own, H in zip(hits, heads, strict=True)]
    return sum(shares) / len(shares)


def needle_tokens(item: Item) -> list[int]:
    """Places in the context of the tokens that hold what is asked."""
    return sorted({token for start, stop in item.needles for token in range(start, stop)})


def references_of(unit: Unit, items: dict[int, Item]) -> list[Reference]:
    """What a unit's items ask."""
    return [
        Reference(
            seed=unit.seed,
            task=unit.task,
            item=index,
            question=place,
            context_sha=tokens_sha(item.context_ids),
            num_context=len(item.context_ids),
            question_ids=tuple(asked.question_ids),
            gold_ids=tuple(asked.gold_ids),
            references=tuple(asked.references),
        )
        for index, item in items.items()
        for place, asked in enumerate(item.asked)
    ]


def alike(items: dict[int, Item]) -> list[dict[int, Item]]:
    """Items that can be read together: what follows their contexts is equally long, and ends alike. Contexts
    may differ in length, and are padded."""
    groups: dict[Any, dict[int, Item]] = {}
    for index, item in items.items():
        tails = tuple((len(one.question_ids), one.generate) for one in item.asked)
        told = tuple(len(read_back(item, question)) for question in range(len(item.asked)))
        key = (tails, told, item.end_ids)
        groups.setdefault(key, {})[index] = item
    return list(groups.values())


def read_back(item: Item, question: int = 0) -> tuple[int, ...]:
    """What generation reads of a right answer: all but its last generated token, which nothing comes after,
    and what is never generated (an end token). None of it, where one token is generated."""
    asked = item.asked[question]
    return tuple(asked.gold_ids[: asked.generate - 1])
