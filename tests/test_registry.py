"""Names resolve, and an unknown one is answered with the nearest and with all."""

import pytest

from retain.registry import lookup, nearest, suggest

TABLE = {"snapkv": 1, "defensive": 2, "observed_risk": 3, "h2o": 4}


def test_lookup_returns_what_the_table_holds() -> None:
    assert lookup("defensive", TABLE, what="score") == 2


def test_unknown_name_gets_the_nearest_and_the_list() -> None:
    message = (
        r"^unknown score 'snapk': did you mean 'snapkv'\? Known: defensive, h2o, observed_risk, snapkv\.$"
    )
    with pytest.raises(ValueError, match=message):
        lookup("snapk", TABLE, what="score")


def test_a_name_near_nothing_gets_the_list_alone() -> None:
    with pytest.raises(ValueError, match=r"^unknown score 'zzz'\. Known: defensive, "):
        lookup("zzz", TABLE, what="score")


def test_an_empty_table_says_so() -> None:
    with pytest.raises(ValueError, match=r"unknown gate family 'mlp'\. Known: none\."):
        lookup("mlp", {}, what="gate family")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("SnapKV", "snapkv"),
        ("observed-risk", "observed_risk"),
        ("observed", "observed_risk"),
        ("defensve", "defensive"),
        ("", None),
        ("zzz", None),
    ],
)
def test_nearest(typed: str, meant: str | None) -> None:
    assert nearest(typed, TABLE) == meant


def test_suggest_is_a_clause_or_nothing() -> None:
    assert suggest("fusoin", ["fusion", "floor"]) == " (did you mean 'fusion'?)"
    assert suggest("zzz", ["fusion", "floor"]) == ""
