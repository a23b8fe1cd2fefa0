"""Names resolve, and an unknown one is answered with the nearest and with all."""

import pytest

from retain.process.registry import lookup, suggest
from tests.refused import refused

TABLE = {"snapkv": 1, "defensive": 2, "observed_risk": 3, "h2o": 4}


def test_an_unknown_name_gets_the_nearest_and_the_list() -> None:
    assert lookup("defensive", TABLE, what="score") == 2
    said = r"^unknown score 'snapk': did you mean 'snapkv'\? Known: defensive, h2o, observed_risk, sn"
    refused(said, lookup, "snapk", TABLE, what="score")
    refused(r"^unknown score 'mlp'\. Known: none\.$", lookup, "mlp", {}, what="score")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        *(("SnapKV", "snapkv"), ("observed-risk", "observed_risk")),
        *(("observed", "observed_risk"), ("defensve", "defensive"), ("", None), ("zzz", None)),
    ],
)
def test_the_nearest_name_is_suggested_if_any(typed: str, meant: str | None) -> None:
    assert suggest(typed, TABLE) == (f" (did you mean {meant!r}?)" if meant else "")
