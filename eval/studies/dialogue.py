"""Writes long conversations: facts, questions, and text that a model writes on from.

No other turn contains the first fact's words, so that a model that answers for it at the end has kept the
first turn.
"""

from dataclasses import dataclass

import numpy as np

from retain.reference.documents import Content, Writer
from retain.reference.tokenizer import BOS_ID

# Kinds in turn: half of the turns state a fact, a quarter asks for the last one, a quarter has the model
# write.
KINDS = ("state", "state", "ask", "write")
# Tokens of a turn that states or asks, and of one that is written on from.
TURN_TOKENS, PROMPT_TOKENS = 16, 8
# The first turn's fact stands behind so many other tokens, which every policy protects.
SINKS = 4
# Streams of the generator, apart from those of `retain.eval.tasks.reference_basic`.
_STREAM = 13


@dataclass(frozen=True)
class Turn:
    """Tokens that are read at once: of one of `KINDS`, with the word asked for, None where nothing is."""

    kind: str
    ids: tuple[int, ...]
    answer: int | None = None


@dataclass(frozen=True)
class Conversation:
    """Turns, in order (the model's answers and text come between them), the key and value of the fact that
    the first one states, and the question that asks for it."""

    turns: tuple[Turn, ...]
    key: int
    value: int
    question: tuple[int, ...]


def write_conversation(seed: int, index: int, turns: int) -> Conversation:
    """A conversation for the model of one seed; the same arguments give the same one.

    The first turn states a fact after at least `SINKS` other tokens; no other turn contains its words.
    """
    own = int(np.random.SeedSequence([_STREAM, seed, index]).generate_state(1)[0])
    writer = Writer("eval", own)
    words = writer.draw(2 * turns)
    filler = iter(writer.filler(turns * TURN_TOKENS, words, ()).tolist())
    made: list[Turn] = []
    facts: list[tuple[int, int]] = []
    for number in range(turns):
        kind = KINDS[number % len(KINDS)]
        said: tuple[int, ...] = ()
        answer = None
        if kind == "state":
            facts.append((words.pop(), words.pop()))
            said = writer.groups(Content([facts[-1]], [], [], []), 0)[0][0].ids
        elif kind == "ask":
            said, answer = writer.ask_get(*facts[-1]).ids, facts[-1][1]
        room = (PROMPT_TOKENS if kind == "write" else TURN_TOKENS) - len(said)
        text = [BOS_ID] * (number == 0) + [next(filler) for _ in range(room - (number == 0))]
        # A question is answered at once; the first fact stands behind what every policy protects.
        least = SINKS if number == 0 else 0
        at = room if kind == "ask" else int(writer.rng.integers(least, room + 1))
        made.append(Turn(kind, (*text[:at], *said, *text[at:]), answer))
    return Conversation(tuple(made), *facts[0], writer.ask_get(*facts[0]).ids)
