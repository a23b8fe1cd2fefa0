"""`retain try`: one question on a text, answered from the full cache and from a tenth of it.

    retain try [--text FILE --question QUESTION] [--model NAME] [--gates FOLDER] [--keep-ratio 0.1]

The text is read and evicted from before the question is known. Each policy's answer is printed with what its
cache holds, and a page shows the text with every token shaded by the share of heads that keep it.
"""

import argparse
import textwrap
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from retain.eval.report.page import Shown, document_page
from retain.eval.run.answers import respond
from retain.eval.run.memory import positions_held
from retain.eval.run.plan import load_model
from retain.eval.tasks.encode import encode
from retain.eval.tasks.row import Row
from retain.hf.cache.cache import Cache
from retain.process.command import command

TEXT = Path(__file__).parent / "try.txt"
QUESTION = "What is the registration number of the ferry?"
BEGINS = "The registration number of the ferry is"
# Policies shown next to the gates': the one that most compare with, and one that keeps unlike keys.
OTHERS = ("snapkv", "keydiff")
ANSWER_TOKENS = 24


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        "retain try", description="Ask one question of a text, from a full cache and from a tenth of it."
    )
    made.add_argument("--text", type=Path, help="file in UTF-8; without it, a text that ships")
    made.add_argument("--question", help="asked of the text")
    made.add_argument("--begins", default="", help="how the answer begins, which small models need")
    made.add_argument("--model", default="smollm2-135m", help="name, folder or hub name of a model")
    made.add_argument("--gates", help="folder or hub id; left out: those that ship for the model")
    made.add_argument("--keep-ratio", type=float, default=0.1, help="kept / seen")
    made.add_argument("--out", type=Path, default=Path("retain-try.html"), help="the page")
    made.add_argument("--device", default="cpu", help="where the model runs")
    return made


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Answers the question from the full cache and under each policy; prints, and writes the page.

    Raises:
        ValueError: A text without its question, or something that the model or a cache refuses.
    """
    given = parser().parse_args(arguments)
    if (given.text is None) != (given.question is None):
        raise ValueError("--text and --question go together: pass both, or none for the text that ships.")
    text, question, begins = given.text or TEXT, given.question or QUESTION, given.begins
    if given.text is None:
        begins = BEGINS
    model, tokenizer = load_model(given.model, given.device)
    context = text.read_text(encoding="utf-8").strip()
    row = Row("try", context, f"\n{question}\n", ("",), ANSWER_TOKENS, answer_prefix=begins)
    asked = encode(row, tokenizer, model)
    ids, default = asked.context_ids, signature(Cache).parameters["policy"].default
    print(f"{len(ids):,} tokens are read and evicted from; then comes the question: {question}")
    policies: dict[str, dict[str, Any]] = {"full cache": {"policy": None}}
    policies |= {name: {"policy": name, "keep_ratio": given.keep_ratio} for name in (*OTHERS, default)}
    policies[default] |= {} if given.gates is None else {"gates": given.gates}
    Cache(model, **policies[default])  # refused before anything is read
    given.out.parent.mkdir(parents=True, exist_ok=True)
    shown, width = [], max(map(len, policies))
    for name, how in policies.items():
        cache = Cache(model, **how)
        with torch.inference_mode():
            cache.prefill(torch.tensor([ids], device=model.device))
            mib, heads = cache.report().total.bytes_held / 2**20, positions_held(cache)
            kept_T = torch.cat(heads).bincount(minlength=len(ids)).tolist()
            read_1T = torch.tensor([[*ids, *asked.question_ids]], device=model.device)
            (answer,) = respond(model, cache, read_1T, new_tokens=ANSWER_TOKENS, end_ids=asked.end_ids)
        words = tokenizer.decode(list(answer), skip_special_tokens=True).split()
        said = " ".join([begins, *words]).strip()
        shown.append(Shown(name, said, mib, tuple(kept_T), len(heads)))
        share = f"{given.keep_ratio:.0%}" if "keep_ratio" in how else "all"
        print(f"  {name:<{width}}  {share:>4}  {mib:6.1f} MiB  {textwrap.shorten(said, 96)}")
    title = f"{given.keep_ratio:.0%} of a cache: what is kept, what is answered"
    pieces = [tokenizer.decode([token]) for token in ids]
    given.out.write_text(document_page(title, question, pieces, shown), encoding="utf-8")
    print(f"Page: {given.out} (each token shaded by the share of heads that keep it)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
