"""Training documents: exact lengths, targets that hold, positions that only grow."""

import numpy as np
import pytest

from retain.reference.curriculum import (
    Example,
    collate,
    copy_document,
    dense_document,
    example,
    text_document,
)
from retain.reference.documents import Writer


@pytest.mark.parametrize("write", [text_document, dense_document, copy_document])
@pytest.mark.parametrize("length", [64, 128])
def test_every_target_accepts_the_token_that_follows(write, length: int) -> None:
    writer = Writer("train", 1, held_out=True)
    for _ in range(20):
        one: Example = write(writer, length, 2200)
        assert one.ids.shape == one.positions.shape == (length,)
        assert one.targets
        for target in one.targets:
            assert int(one.ids[target.offset + 1]) in target.accept, target


def test_positions_grow_and_reach_far_when_stretched() -> None:
    writer = Writer("train", 2)
    reached = []
    for _ in range(20):
        positions = text_document(writer, 256, 2200).positions
        assert (np.diff(positions) >= 1).all()
        reached.append(positions[-1])
    assert max(reached) > 1000
    assert (text_document(writer, 256, 0).positions == np.arange(256)).all()


def test_a_batch_holds_the_targets_of_its_rows() -> None:
    writer = Writer("train", 3)
    examples = [example(writer, 128, 0) for _ in range(3)]
    batch = collate(examples)
    flat = batch.ids_BT.reshape(-1)
    assert batch.ids_BT.shape == (3, 128)
    assert len(batch.places) == sum(len(one.targets) for one in examples)
    assert all(flat[place + 1] in accept for place, accept in zip(batch.places, batch.accept, strict=True))
