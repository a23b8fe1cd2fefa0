"""Query centres, measured: where a head's queries lie before RoPE, for the score `triattention`.

    python -m retain.eval.diagnose.query_centres --model reference:0 --output centres.safetensors

One pass over any text is enough: TriAttention (arXiv 2604.04921) measures them once a model, on up to 32,768
tokens, and finds that they change little with the text.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from retain.eval.diagnose.head_weights import load
from retain.hf.intercept.observe import observe
from retain.process.command import command
from retain.reference.documents import Document
from retain.scores.triattention import centres_of


@torch.no_grad()
def measure_query_centres(model: Any, documents: Iterable[Document]) -> dict[str, Tensor]:
    """Mean query before RoPE and mean length of its pairs, over all tokens of the documents.

    Returns:
        for each layer that evicts `centre.IDX` `[Q, D]` and `length.IDX` `[Q, F]`, float32.

    Raises:
        ValueError: there are no documents, or the model's rotary embedding is not understood.
    """
    total, tokens = dict[str, Tensor](), 0
    for document in documents:
        ids = [*document.context_ids, *document.appendix_ids]
        for evidence in observe(model, torch.tensor([ids], device=model.device)):
            if evidence.rotary is None:
                raise ValueError(
                    "query centres lie before RoPE, and this model's is not understood: take keydiff."
                )
            found = zip(("centre", "length"), centres_of(evidence), strict=True)
            for name, mean in ((f"{kind}.{evidence.layer_idx}", own[0]) for kind, own in found):
                total[name] = total.get(name, 0) + mean.double().cpu() * len(ids)
        tokens += len(ids)
    if not tokens:
        raise ValueError("query centres are measured on documents, and there are none: pass at least one.")
    return {name: (own / tokens).float() for name, own in total.items()}


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, measures, writes."""
    parser = argparse.ArgumentParser(description="Measure where queries lie before RoPE (triattention).")
    parser.add_argument("--model", required=True, help="reference:0, or a hub id or folder")
    parser.add_argument("--jsonl", help="documents: rows of 'text', or of 'context', 'question', 'answer'")
    parser.add_argument("--documents", type=int, default=8, help="how many at most")
    parser.add_argument("--context-tokens", type=int, default=4096, help="tokens of a context")
    parser.add_argument("--output", required=True, help="the file, e.g. centres.safetensors")
    given = parser.parse_args(arguments)
    model, found = load(given.model, given.jsonl, given.documents, given.context_tokens)
    centres = measure_query_centres(
        model, iter(tqdm(found, total=given.documents, desc="documents", unit="document"))
    )
    path = Path(given.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(centres, path)
    layers = sum(name.startswith("centre.") for name in centres)
    print(f"Centres of {layers} layers: {path}\nPass observed_settings={{'centres': '{path}'}}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
