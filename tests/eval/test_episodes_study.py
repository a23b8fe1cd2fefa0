"""Episodes beside one cache: equal bytes, routing that is told, the command."""

import torch

from retain.eval.studies.episodes import (
    Setting,
    ask,
    main,
    of_episodes,
    of_one_cache,
    random_embedding,
    write_context,
)
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from retain.reference import load_model

SMALL = Setting(
    contexts=1, tokens=200, facts=2, tokens_per_head=81, episodes=2, segment=20, chunk=100, seeds=(0,)
)


def test_a_context_states_its_facts_where_it_says() -> None:
    ids, questions, places = write_context(0, 3, SMALL)
    again = write_context(0, 3, SMALL)
    assert torch.equal(ids, again[0]) and ids.shape == (1, 200)
    for question, place in zip(questions, places, strict=True):
        key, (value,) = question.ids[-2], question.answers
        assert int(ids[0, place]) == key and value in ids[0, place : place + 8].tolist()


def test_arms_hold_equal_bytes_and_the_told_one_is_routed_rightly() -> None:
    model = load_model(0)
    with attach(model):
        one = {row.arm: row for row in of_one_cache(model, SMALL, 0, 0)}
        many = {row.arm: row for row in of_episodes(model, SMALL, 0, 0)}
        ids, questions, _ = write_context(0, 0, SMALL)
        full = Cache(model, None).prefill(ids)
        assert one["full"].found == tuple(ask(model, ids, own, full.fork()) for own in questions)
    assert one["full"].bytes_held == full.bytes_held() and all(one["full"].found)
    equal = {one[arm].bytes_held for arm in SMALL.policies}
    equal |= {many[arm].bytes_held for arm in ("episodes", "episodes, told", "episodes, random")}
    assert len(equal) == 1 and equal.pop() * 200 == full.bytes_held() * 80
    assert many["episodes, each"].bytes_held * 200 == full.bytes_held() * 2 * 81
    assert many["episodes, told"].routed == (True, True)


def test_random_vectors_are_drawn_anew_for_every_text() -> None:
    embed = random_embedding(0)
    first, second = embed([[1], [1]])
    assert not torch.equal(first, second)


def test_the_command(capsys) -> None:
    small = "--contexts 1 --seed 0 --tokens 160 --facts 1 --tokens-per-head 80 --episodes 2 --segment 20"
    assert main([*small.split(), "--chunk", "80", "--policies", "snapkv"]) == 0
    shown = capsys.readouterr().out
    rows = [line.split("/")[0].split() for line in shown.splitlines()[2:]]
    names = [" ".join(row[:-1]) for row in rows]
    arms = ["episodes", "episodes, told", "episodes, each", "episodes, random"]
    assert names == ["full", "snapkv", *arms]
    assert "2 caches together" in shown and "95 % intervals over contexts" in shown
