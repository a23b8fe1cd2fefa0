"""A hundred turns in one cache: the first turn's fact is found if it was pinned; memory stays constant."""

import json

import pytest

from retain.eval import conversation
from retain.eval.conversation import (
    FULL,
    SINKS,
    TURN_TOKENS,
    Conversation,
    Setting,
    main,
    make_cache,
    play,
    run,
    write_conversation,
)
from retain.hf.attach import attached
from retain.reference import load_model
from retain.reference.tokenizer import ANSWER_ID, BOS_ID, EOS_ID

SMALL = Setting(conversations=1, seeds=(0,), every=2, written=3, probes=(), policies=("snapkv",))
# Entries of one key and value of the reference model, in bytes, and (layer, KV head) pairs.
ENTRY, PAIRS = 2 * 64 * 4, 4 * 2


def expected(setting: Setting, told: Conversation) -> tuple[list[int], list[int]]:
    """Tokens seen and entries a head holds after every turn: the regime, counted by hand."""
    seen = held = unread = 0
    seen_after, held_after = [], []
    for turn in told.turns:
        new = unread + len(turn.ids)
        seen, held, unread = seen + new, min(held + new, setting.tokens_per_head), 0
        since = 0
        if turn.kind == "ask":
            unread = 2  # the answer and the end of it
        elif turn.kind == "write":
            unread = 1  # what is generated last is not read
            for _ in range(setting.written - 1):
                seen, held, since = seen + 1, held + 1, since + 1
                if since >= setting.every:
                    held, since = min(held, setting.tokens_per_head), 0
        seen_after.append(seen)
        held_after.append(held)
    return seen_after, held_after


def test_the_first_fact_of_a_hundred_turns_is_found_and_memory_stays_as_it_is():
    full, pinned, control = run(SMALL)
    (told,) = [write_conversation(0, 0, SMALL.turns)]
    seen, held = expected(SMALL, told)
    assert len(seen) == 100 and seen[-1] > 1500
    # The full cache answers, so the question can be answered at all; it grows with every turn.
    assert (full.policy, full.found) == (FULL, {100: (True,)})
    assert full.held == full.seen == tuple(PAIRS * count for count in seen)
    # With the first turn pinned, the answer is found in a cache of 128 entries a head.
    assert pinned.pinned and pinned.found == {100: (True,)} and pinned.fact_held == (1.0,)
    # The same without: the entries are gone, and so is the answer.
    assert not control.pinned and control.found == {100: (False,)} and control.fact_held == (0.0,)
    for one in (pinned, control):
        assert one.seen == full.seen and one.answered == (1.0,)
        assert one.held == tuple(PAIRS * count for count in held)
        assert one.bytes_held == tuple(ENTRY * count for count in one.held)
        # After any forward: the budget, and what came since the last eviction.
        assert one.most_held == SMALL.tokens_per_head + SMALL.every - 1 < 0.1 * seen[-1]
        assert max(one.bytes_allocated[50:]) <= max(one.bytes_allocated[:50]) < 0.2 * full.bytes_allocated[-1]
        assert one.evictions > 100
    assert conversation.problems_of(SMALL, [full, pinned, control]) == []


def test_a_conversation_states_its_first_fact_once():
    told = write_conversation(2, 3, 40)
    assert told == write_conversation(2, 3, 40) != write_conversation(2, 4, 40)
    first, later = told.turns[0].ids, [word for turn in told.turns[1:] for word in turn.ids]
    assert first[0] == BOS_ID and len(first) == TURN_TOKENS
    assert min(first.index(told.key), first.index(told.value)) >= SINKS
    assert not {told.key, told.value} & set(later)
    kinds = [turn.kind for turn in told.turns]
    assert [kinds.count(kind) for kind in ("state", "ask", "write")] == [20, 10, 10]
    asked = [(number, turn) for number, turn in enumerate(told.turns) if turn.kind == "ask"]
    for number, turn in asked:
        assert turn.ids[-1] == ANSWER_ID and turn.answer in told.turns[number - 1].ids
    assert told.question[-1] == ANSWER_ID and told.question[-2] == told.key


def test_a_batch_of_conversations_is_each_of_them_alone():
    setting = Setting(turns=16, seeds=(1,), tokens_per_head=64, every=4, written=5)
    told = [write_conversation(1, index, setting.turns) for index in range(2)]
    model = load_model(1)
    with attached(model):

        def played(chosen):
            indices = [told.index(one) for one in chosen]
            cache = make_cache(model, "random", pinned=True, setting=setting, indices=indices)
            return play(model, chosen, cache, written=setting.written, probes=(8, 16))

        both, alone = played(told), [played([one]) for one in told]
    for number in (8, 16):
        assert both["found"][number] == tuple(one["found"][number][0] for one in alone)
    for name in ("seen", "held", "bytes_held"):
        assert both[name] == tuple(a + b for a, b in zip(*(one[name] for one in alone), strict=True))
    assert both["answered"] == tuple(one["answered"][0] for one in alone)


def test_growth_is_found():
    (_, pinned, _) = run(Setting(turns=16, conversations=1, seeds=(0,), written=1, policies=("recency",)))
    lower = Setting(turns=16, tokens_per_head=60, every=4)
    problems = conversation.problems_of(lower, [pinned])
    assert any("a head held" in line and "above 63" in line for line in problems)
    assert any("bytes_held grew" in line for line in problems)  # 16 turns do not fill 128 entries in 8


def test_the_command_prints_and_writes(tmp_path, capsys):
    path = tmp_path / "runs" / "conversation.json"
    typed = (
        "--turns 40 --conversations 1 --tokens-per-head 64 --written 3 --every 4 --seed 0 --policies recency"
    )
    assert main([*typed.split(), "--json", str(path)]) == 0
    out = capsys.readouterr().out
    record = json.loads(path.read_text())
    full, pinned, control = record["rows"]
    assert (full["policy"], pinned["policy"], control["policy"]) == ("full", "recency, pinned", "recency")
    assert pinned["found"]["40"] == 1 and control["found"]["40"] == 0 and control["fact_held"] == 0
    assert f"{record['played'][0]['tokens']:,} tokens" in out and "+100.0" in out and "constant" in out
    assert [len(one["bytes_held"]) for one in record["played"]] == [40] * 3
    assert EOS_ID not in (full["found"], pinned["found"])


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--turns 1", "turns is a whole number of at least 2, got 1"),
        ("--tokens-per-head 40", "tokens_per_head is a whole number of at least 52, got 40"),
        ("--seed 9", "seed 9 is no reference model: take 0, 1, 2"),
        ("--policies snapvk", "did you mean 'snapkv'"),
        ("--policies gate", "needs gates"),
    ],
)
def test_errors_come_before_work(typed, message, capsys, monkeypatch):
    monkeypatch.setattr(conversation, "play", lambda *args, **settings: pytest.fail("work began"))
    assert main(typed.split()) == 2
    assert message in capsys.readouterr().err
