"""A hundred turns in one cache: the first turn's fact is found if it was pinned; memory stays constant."""

import json
from dataclasses import replace

import pytest

from retain.config import save
from retain.eval.studies import conversation
from retain.eval.studies.conversation import FULL, Setting, main, make_cache, play, run
from retain.eval.studies.dialogue import PROMPT_TOKENS, SINKS, TURN_TOKENS, Conversation, write_conversation
from retain.hf.intercept.attach import attach
from retain.presets import load_policy
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
        assert one.most_held["head"] == SMALL.tokens_per_head + SMALL.every - 1 < 0.1 * seen[-1]
        assert one.most_held["sequence"] == 4 * one.most_held["layer"] == PAIRS * one.most_held["head"]
        assert max(one.bytes_allocated[50:]) <= max(one.bytes_allocated[:50]) < 0.2 * full.bytes_allocated[-1]
        assert one.evictions[-1] > 100 and len(one.evictions) == 100
    assert conversation.problems_of(SMALL, [full, pinned, control]) == []
    assert conversation.memory_line([full, pinned, control], []).endswith("every forward; constant.")


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
    with attach(model):

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


def test_a_conversation_is_the_same_in_any_batch(monkeypatch):
    """Also where one may not say what another does say, when it answers and when it writes on."""
    setting = Setting(turns=12, seeds=(0,), tokens_per_head=64, every=4, written=6)
    told = [write_conversation(0, index, setting.turns) for index in range(2)]
    model, said, sha = load_model(0), [], conversation.tokens_sha
    monkeypatch.setattr(conversation, "tokens_sha", lambda row: said.append(row) or sha(row))

    def shas(chosen):
        cache = make_cache(model, "recency", pinned=True, setting=setting, indices=range(len(chosen)))
        return play(model, chosen, cache, written=setting.written, probes=())["tokens_sha"]

    with attach(model):
        shas(told[:1])
        # The first one's first answer, and a word that it writes, become the words of the other's first fact.
        read = sum(len(turn.ids) for turn in told[0].turns[:3])
        answer, written = said[0][read], said[0][read + 2 + PROMPT_TOKENS]
        assert answer == told[0].turns[2].answer
        first = told[1].turns[0]
        words = {told[1].key: answer, told[1].value: written}
        first = replace(first, ids=tuple(words.get(word, word) for word in first.ids))
        other = replace(told[1], turns=(first, *told[1].turns[1:]), key=answer, value=written)
        both = shas([told[0], other])
        assert both == (*shas([told[0]]), *shas([other]))
        assert said[0] == said[1], "what the other may not say, this one still says"


SHORT = Setting(16, 1, seeds=(0,), written=1, probes=(), policies=("recency", "adakv"))


@pytest.fixture(scope="module")
def played():
    return run(SHORT)


def test_memory_is_judged_by_what_the_budget_bounds(played, tmp_path):
    """Where heads share a budget one of them may hold more than its share, and a layer may not."""
    _, recency, _, adakv, _ = played
    lower = replace(SHORT, tokens_per_head=120, every=4)
    assert conversation.unit_of("adakv") == "layer" and conversation.unit_of("snapkv") == "head"
    assert conversation.unit_of("pyramidkv") == conversation.unit_of("layer_defensivekv") == "sequence"
    assert conversation.unit_of("duoattention") == "sequence"
    assert "a head held 128 entries, above 123" in "".join(conversation.problems_of(lower, [recency]))
    assert "a layer held 256 entries, above 246" in "".join(conversation.problems_of(lower, [adakv]))
    uneven = replace(adakv, most_held={**adakv.most_held, "head": 200})
    assert conversation.problems_of(SHORT, [uneven]) == []
    # Quotas and head classes give heads budgets of their own, also where the scope is `head`.
    made = load_policy("gate", ["allocation.quotas=calibrated"])
    path = tmp_path / "quotas.yaml"
    save(made, path)
    assert made.scope == "head" and conversation.unit_of(str(path)) == "sequence"
    save(replace(made, allocation=replace(made.allocation, quotas=None)), path)
    assert conversation.unit_of(str(path)) == "head"


def test_growth_is_looked_for_once_evictions_began(played):
    pinned = played[1]
    # 128 entries are full after 8 turns, so that there is a cycle or two to compare: not enough, and enough.
    steady = (0,) * 5 + (1, 2, 3) + tuple(range(4, 12))
    filled = replace(pinned, evictions=steady, bytes_held=(1, 2, 3, 4, 5, 6, 7, 8) + (9, 9, 9, 10) * 2)
    assert conversation.cycles_of(filled, "bytes_held") == [10, 10]
    assert conversation.problems_of(SHORT, [filled]) == []
    grown = replace(filled, bytes_held=(*filled.bytes_held[:-1], 11))
    assert conversation.problems_of(SHORT, [grown]) == ["recency, pinned, seed 0: bytes_held grew to 11"]
    short = replace(grown, evictions=(0,) * 9 + (1,) * 7)
    assert conversation.cycles_of(short, "bytes_held") == [11]
    assert conversation.problems_of(SHORT, [short]) == []
    line = conversation.memory_line([short], [])
    assert "too short to judge whether it is constant (recency, pinned)" in line


def test_what_pinning_changes_has_an_interval_only_where_it_can_vary(played):
    setting = replace(SHORT, seeds=(0, 1), policies=("recency",))

    def line(*by_seed):
        both = [
            replace(one, seed=seed, found={16: tuple(bool(hit) == one.pinned for hit in hits)})
            for one in played[1:3]
            for seed, hits in enumerate(by_seed)
        ]
        # Pinned: found where `hits`; not pinned: found where not.
        return conversation._pinning_lines(conversation.differences(setting, both))

    about, shown = line((1, 1), (1, 1))[1:]
    assert about == "(paired over n = 4 conversations; conditional on these seeds):"
    assert shown.endswith("+100.0 (the same in all 4)") and "[" not in shown
    assert line((1, 1), (0, 0))[-1].endswith("+0.0 (the same in all of a seed)")
    about, shown = line((1, 1, 0), (1, 0, 1))[1:]
    assert "n = 6 conversations; 95% intervals: Student's t within each seed; conditional" in about
    assert "+33.3 [" in shown


def test_the_command_prints_and_writes(tmp_path, capsys):
    path = tmp_path / "runs" / "conversation.json"
    typed = "--turns 40 --conversations 1 --tokens-per-head 64 --written 3 --every 4 --seed 0"
    assert main([*typed.split(), "--policies", "recency", "--json", str(path)]) == 0
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
