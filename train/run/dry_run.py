"""Makes one real training step on the longest documents, and says seconds and peak memory.

The step is the run's own: model, gates, packs, gradient and optimiser. Nothing is written. Its documents are
the longest that there are (of a stream, the first step's), so that no later step needs more memory, and few
take longer.
"""

import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from retain.train.data.corpus import Corpus
from retain.train.data.document import Document
from retain.train.loop import Lesson, synchroniser_of, take_step_
from retain.train.run.parallel import Accelerator, gather_object


def dry_run(lesson: Lesson, accelerator: Accelerator) -> str:
    """Prepares the gates, takes one step, and returns a line for the user, the same on every process.

    Raises:
        ValueError, FloatingPointError: as the first step of the run would.
    """
    documents = longest_of(lesson)
    lesson.objective.prepare_(documents)
    step = replace(lesson, corpus=Corpus(tuple(documents), (), len(documents)))
    synchroniser = synchroniser_of(step, accelerator)
    began = time.perf_counter()
    record = take_step_(step, synchroniser, accelerator, 0, Path())
    if accelerator.device.type == "cuda":
        torch.cuda.synchronize()
    everyone = gather_object([(time.perf_counter() - began, peak_bytes(accelerator.device))])
    seconds, peak = (max(found) for found in zip(*everyone, strict=True))
    longest, steps = max(map(lesson.size_of, documents)), lesson.training.steps
    return (
        f"dry run: one step of {len(documents)} documents, {record['tokens']:,} tokens, what is read after "
        f"them included (the longest {longest:,}): {seconds:.1f} s, peak {peak / 2**30:.2f} "
        f"GiB on {accelerator.device.type}. {steps} such steps take "
        f"{steps * seconds / 3600:.2g} hours; held-out documents and calibration come on top."
    )


def longest_of(lesson: Lesson) -> list[Document]:
    """As many of the longest documents as a step has; of a stream, those of its first step."""
    first = lesson.corpus.documents_of(0)
    if not isinstance(lesson.corpus, Corpus):
        return first
    known = sorted(lesson.corpus.train, key=lambda one: (-lesson.size_of(one), one.key))
    return (known * -(-len(first) // len(known)))[: len(first)]


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has held so far: of its fullest GPU, or of the host."""
    if device.type == "cuda":
        return max(map(torch.cuda.max_memory_reserved, range(torch.cuda.device_count())))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
