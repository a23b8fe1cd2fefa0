"""Yields the batches of a training run, in order, from any step on.

The shipped models' documents are one stream of one generator, which a resumed run generates again from the
start; an indexed recipe draws every step from a seed of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from torch.utils.data import DataLoader, Dataset

from retain.reference.curriculum import Batch, collate, example
from retain.reference.documents import Texts, Writer, read_texts

if TYPE_CHECKING:
    from retain.reference.recipe import Phase, Recipe

# Batches that a process of documents is ahead.
AHEAD = 4


def draw(writer: Writer, recipe: Recipe, phase: Phase, index: int) -> tuple[int, Batch]:
    """Draw the next batch of stage `index`; a fifth of the steps goes back to a shorter length."""
    length = phase.stages[index].length
    if index and writer.rng.random() < 0.2:
        length = phase.stages[int(writer.rng.integers(max(0, index - 2), index))].length
    # All of a batch's reaches come before its documents: the order in which the shipped models' were drawn.
    reaches = [
        recipe.reach if writer.rng.random() < recipe.stretch_share else 0
        for _ in range(recipe.sequences(length))
    ]
    limits = {
        "multi_share": phase.multi_share,
        "statement_tokens": recipe.statement_tokens,
        "most_facts": recipe.most_facts,
    }
    made = collate([example(writer, length, reach, **limits) for reach in reaches])
    return phase.stages[index].length, made


def batch_at(
    recipe: Recipe, phase_idx: int, seed: int, step: int, texts: Texts | None = None
) -> tuple[int, Batch]:
    """Draw the batch of one step of a phase of an indexed recipe, independent of earlier steps."""
    share = recipe.prose_share
    writer = Writer("train", (seed, phase_idx, step), held_out=True, prose_share=share, texts=texts)
    phase = recipe.phases[phase_idx]
    return draw(writer, recipe, phase, phase.stage_of(step))


def batches(
    recipe: Recipe, phase_idx: int, seed: int, *, start: int = 0, loaders: int = 0
) -> Iterator[tuple[int, Batch]]:
    """Yield `(stage length, batch)` of every step of a phase.

    Args:
        recipe: Of the run.
        phase_idx: Which of its phases.
        seed: Of the documents.
        start: Step to begin with.
        loaders: Processes that write documents; 0: this one, as a recipe that is one stream needs. The
            batches are the same.

    Raises:
        ValueError: several processes for a recipe that is one stream.
    """
    phase = recipe.phases[phase_idx]
    if not recipe.indexed:
        if loaders:
            raise ValueError(
                f"loaders={loaders}: this recipe's documents are one stream, which one process writes: pass 0"
            )
        writer = Writer("train", 1000 * (phase_idx + 1) + seed, held_out=True, prose_share=recipe.prose_share)
        drawn = (draw(writer, recipe, phase, phase.stage_of(step)) for step in range(phase.steps))
        return islice(drawn, start, None)
    steps = range(start, phase.steps)
    if not loaders:
        return (batch_at(recipe, phase_idx, seed, step) for step in steps)
    return iter(
        DataLoader(
            _Steps(recipe, phase_idx, seed),
            batch_size=None,
            sampler=steps,
            num_workers=loaders,
            prefetch_factor=AHEAD,
            # A process that has a GPU open cannot be forked.
            multiprocessing_context="spawn",
        )
    )


class _Steps(Dataset[tuple[int, Batch]]):
    """Steps of a phase as a map-style data set. It carries the text, which every process would otherwise read
    and encode again."""

    def __init__(self, recipe: Recipe, phase_idx: int, seed: int) -> None:
        self.run = (recipe, phase_idx, seed)
        self.texts = read_texts("train", recipe.prose_share)

    def __getitem__(self, step: int) -> tuple[int, Batch]:
        return batch_at(*self.run, step, self.texts)


def parts(batch: Batch, sequences: int) -> Iterator[Batch]:
    """Split a batch into parts of at most so many sequences, each with its own targets, in order."""
    count, length = batch.ids_BT.shape
    if sequences >= count:
        yield batch
        return
    rows = batch.places // length
    for first in range(0, count, sequences):
        inside = (rows >= first) & (rows < first + sequences)
        yield replace(
            batch,
            ids_BT=batch.ids_BT[first : first + sequences],
            positions_BT=batch.positions_BT[first : first + sequences],
            places=batch.places[inside] - first * length,
            accept=batch.accept[inside],
            kinds=batch.kinds[inside],
        )
