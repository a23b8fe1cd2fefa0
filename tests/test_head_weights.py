"""Weights of heads: what is read, and what is refused."""

import pytest

from retain.attention.head_weights import check_weights, format_weights, read_weights
from tests.refused import refused


def test_a_file_is_a_number_for_each_head_of_each_layer(tmp_path):
    path = tmp_path / "heads.json"
    path.write_text('{"10": [0.25, 3], "2": [0, 1.0, 5e-1]}')
    weights = read_weights(str(path))
    assert [*weights.items()] == [(2, (0.0, 1.0, 0.5)), (10, (0.25, 3.0))]
    assert check_weights(str(path), [3, 2], [2, 10]) == [(0.0, 1.0, 0.5), (0.25, 3.0)]
    path.write_text(format_weights({1: [0.1], 3: [1 / 3]}))
    assert path.read_text() == '{\n  "1": [0.1],\n  "3": [0.3333333333333333]\n}\n'
    assert dict(read_weights(str(path))) == {1: (0.1,), 3: (1 / 3,)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.5\t0.5\n", r"are no JSON \(.*\); wanted a list of numbers"),
        ("[[1, 0]]", "hold no layers; wanted a list"),
        ('{"first": [1]}', r"hold \[1\] for layer 'first'; wanted"),
        ('{"0": [1, -0.5]}', r"hold \[1, -0.5\] for layer '0'; wanted a list of numbers of at least 0"),
        ('{"0": [NaN]}', r"hold \[nan\] for layer '0'"),
        ('{"0": [true]}', r"hold \[True\] for layer '0'"),
    ],
)
def test_what_holds_no_weights_is_refused(tmp_path, text, message):
    path = tmp_path / "heads.json"
    path.write_text(text)
    refused(message, read_weights, str(path))


def test_another_models_weights_and_a_missing_file_are_refused(tmp_path):
    path = tmp_path / "heads.json"
    path.write_text('{"5": [0.5, 0.5]}')
    for heads_L, has in (([2, 2], "2 layers of 2 KV heads"), ([3], "1 layers of 3 KV heads")):
        message = f"are of 1 layers of 2 KV heads, .* evicts from {has}: pass"
        refused(message, check_weights, str(path), heads_L)
    check_weights(str(path), [2])
    check_weights(str(path), [2], [5])
    message = "are of layers 5, and the model evicts from 4: pass"
    refused(message, check_weights, str(path), [2], [4])
    with pytest.raises(FileNotFoundError, match="do not exist: pass allocation=.*head_weights measures them"):
        read_weights(str(tmp_path / "none.json"))
