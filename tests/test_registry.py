"""Names resolve, and an unknown one is answered with the nearest and with all."""

import pytest

from retain.process.registry import lookup, nearest, suggest

TABLE = {"snapkv": 1, "defensive": 2, "observed_risk": 3, "h2o": 4}


@pytest.mark.parametrize(
    ("name", "table", "message"),
    [
        (
            "snapk",
            TABLE,
            r"^unknown score 'snapk': did you mean 'snapkv'\? Known: defensive, h2o, observed_risk, sn",
        ),
        ("zzz", TABLE, r"^unknown score 'zzz'\. Known: defensive, "),
        ("mlp", {}, r"^unknown score 'mlp'\. Known: none\.$"),
    ],
)
def test_an_unknown_name_gets_the_nearest_and_the_list(name: str, table: dict, message: str) -> None:
    assert lookup("defensive", TABLE, what="score") == 2
    with pytest.raises(ValueError, match=message):
        lookup(name, table, what="score")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        *(("SnapKV", "snapkv"), ("observed-risk", "observed_risk")),
        *(("observed", "observed_risk"), ("defensve", "defensive"), ("", None), ("zzz", None)),
    ],
)
def test_the_nearest_name_is_suggested_if_any(typed: str, meant: str | None) -> None:
    assert nearest(typed, TABLE) == meant
    assert suggest(typed, TABLE) == (f" (did you mean {meant!r}?)" if meant else "")
