"""Weights of heads: what is read, and what is refused."""

import pytest

from retain.attention.head_weights import check_weights, format_weights, read_weights
from tests.refused import refused


def test_a_file_is_a_number_for_each_head_of_each_layer(tmp_path):
    path = tmp_path / "heads.json"
    path.write_text('{"10": [0.25, 3], "2": [0, 1.0, 5e-1]}')
    weights = read_weights(str(path))
    assert [*weights.items()] == [(2, (0.0, 1.0, 0.5)), (10, (0.25, 3.0))]
    check_weights(str(path), [3, 2], [2, 10])
    for heads, layers in (([3, 3], [2, 10]), ([3, 2], [2, 9]), ([3], [2])):
        message = r"of another model: they have layers and heads {2: 3, 10: 2}, and .* evicts from {2: 3.*}"
        refused(message, check_weights, str(path), heads, layers)
    path.write_text(format_weights({1: [0.1], 3: [1 / 3]}))
    assert path.read_text() == '{\n  "1": [0.1],\n  "3": [0.3333333333333333]\n}\n'
    assert dict(read_weights(str(path))) == {1: (0.1,), 3: (1 / 3,)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.5\t0.5\n", "at the top: Invalid JSON"),
        ("[[1, 0]]", "at the top: .*; wanted a list"),
        ("{}", "at the top: .* at least 1 item"),
        ('{"first": [1]}', "at first.* valid integer"),
        ('{"0": [1, -0.5]}', r"at 0.1: .*; wanted a list of numbers of at least 0"),
        ('{"0": [NaN]}', "at 0.0: .* finite"),
        ('{"0": [true]}', "at 0.0: .* valid number"),
    ],
)
def test_what_holds_no_weights_is_refused(tmp_path, text, message):
    path = tmp_path / "heads.json"
    path.write_text(text)
    refused(message, read_weights, str(path))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="do not exist: pass allocation=.*head_weights measures them"):
        read_weights(str(tmp_path / "none.json"))
