"""Writes documents that gates learn from, where there are none: text that a model samples, with facts in it.

    python -m retain.train.data.samples --model smollm2-135m --output runs/documents/smollm2-135m.jsonl

The model writes texts, each on a topic that it is asked for, into OUTPUT.texts.jsonl (with `--from FILE`
texts are read instead); a document is two of them, and no text is in two documents. The last texts are in no
document, but in OUTPUT.held.txt, for comparisons. In three of four documents a few sentences with facts are
put between the sentences, and a question about one of them stands beside it, with its answer; the others are
the texts alone. Everything is drawn from the seed, so that the same command writes the same files on the same
machine.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from retain.models.named import load
from retain.process.command import command
from retain.process.provenance import write_text
from retain.train.data.sources import read_jsonl

# Texts that are written at once.
BATCH = 32
FORMS = ("essay", "report", "story", "guide", "lecture", "letter", "chapter of a book", "magazine article")
TOPICS = (
    *("the history of bread", "life in a harbour town", "how bridges are built", "the migration of birds"),
    *("a journey by night train", "repairing an old clock", "the seasons of a forest", "learning to paint"),
    *("a small museum", "how rivers change a landscape", "running a bakery", "the first day at a new school"),
    *("keeping bees", "the making of paper", "a winter in the mountains", "radio in the last century"),
    *("growing tomatoes", "the planning of a city park", "sailing along a coast", "the work of a translator"),
    *("a village market", "how glass is made", "an old library", "teaching children to swim"),
    *("the study of volcanoes", "a family restaurant", "the invention of the bicycle", "caring for a horse"),
    *("rice fields and water", "the restoration of a church", "a science fair", "the sounds of a city"),
    *("tea and its trade", "a lighthouse keeper", "building a wooden boat", "a football club and its town"),
    *("letters from a soldier", "the design of chairs", "deserts at night", "an orchestra on tour"),
)
NAMES = ("Ada", "Boris", "Chen", "Dora", "Emil", "Farah", "Goran", "Hanna", "Igor", "Jasmin", "Kofi", "Lena")
THINGS = ("bicycle", "piano", "canoe", "camera", "ladder", "violin", "tent", "typewriter", "globe", "loom")
TOWNS = ("Bergen", "Porto", "Split", "Galway", "Cusco", "Kyoto", "Tartu", "Malaga", "Leeds", "Izmir", "Dakar")
TRADES = ("baker", "surveyor", "pilot", "tailor", "geologist", "carpenter", "nurse", "locksmith", "painter")
# A sentence, a question, and its answer.
FACTS = (
    ("The locker of {name} opens with the code {code}.", "Which code opens the locker of {name}?", "{code}"),
    ("{name} sold the {thing} for {price} dollars.", "For how much did {name} sell the {thing}?", "{price}"),
    ("{name} moved to {town} as a child.", "To which town did {name} move as a child?", "{town}"),
    ("The {thing} belongs to {name}.", "Whom does the {thing} belong to?", "{name}"),
    ("{name} works as a {trade}.", "What does {name} work as?", "{trade}"),
    ("The telephone number of the office in {town} is {phone}.", "What is the number in {town}?", "{phone}"),
    ("The meeting in {town} begins at {hour}.", "When does the meeting in {town} begin?", "{hour}"),
)


def drawn_fact(rng: random.Random) -> tuple[str, str, str]:
    """A sentence with a fact, a question about it, and the answer."""
    words = {
        "name": rng.choice(NAMES),
        "thing": rng.choice(THINGS),
        "town": rng.choice(TOWNS),
        "trade": rng.choice(TRADES),
        "code": str(rng.randint(1000, 99_999)),
        "price": str(rng.randint(12, 980)),
        "phone": f"{rng.randint(200, 999)}-{rng.randint(1000, 9999)}",
        "hour": f"{rng.randint(7, 21)}:{rng.choice(('05', '20', '35', '50'))}",
    }
    sentence, question, answer = (part.format(**words) for part in rng.choice(FACTS))
    return sentence, question, answer


def document_of(text: str, rng: random.Random) -> dict[str, str]:
    """A document of a sampled text: with facts and a question, or, one in four, as it is."""
    if rng.random() < 0.25:
        return {"text": text}
    sentences = re.split(r"(?<=[.!?])\s+", text)
    facts = {fact[0]: fact for fact in (drawn_fact(rng) for _ in range(rng.randint(1, 4)))}
    # One question a document: a fact that another one contradicts has no answer.
    asked = {fact[1]: fact for fact in facts.values()}
    for sentence, _, _ in asked.values():
        sentences.insert(rng.randint(0, len(sentences)), sentence)
    _, question, answer = rng.choice(list(asked.values()))
    return {"context": " ".join(sentences), "question": question, "answer": answer}


@torch.no_grad()
def write_texts(model: Any, tokenizer: Any, prompts: Sequence[str], *, tokens: int, seed: int) -> list[str]:
    """Samples a text for each prompt, of `tokens / 2` to `tokens` tokens, at temperature 0.8 from the 50
    likeliest tokens."""
    asked = list(prompts)
    if tokenizer.chat_template is not None:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        asked = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    batch = tokenizer(asked, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    torch.manual_seed(seed)
    output = model.generate(
        **batch,
        do_sample=True,
        temperature=0.8,
        top_k=50,  # top_p sorts the vocabulary at every token, which takes as long as the model
        max_new_tokens=tokens,
        min_new_tokens=tokens // 2,
    )
    written = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return [text.strip() for text in written]


def sampled(name: str, *, texts: int, tokens: int, seed: int) -> Iterator[str]:
    """Yields texts that a model writes, a batch at a time, each on a drawn topic."""
    model, tokenizer = load(name)
    for number in tqdm(range(-(-texts // BATCH)), unit="batch"):
        rng = random.Random(f"texts {seed}/{number}")
        prompts = [
            f"Write a long and detailed {rng.choice(FORMS)} about {rng.choice(TOPICS)}." for _ in range(BATCH)
        ]
        yield from write_texts(model, tokenizer, prompts, tokens=tokens, seed=seed * 10**6 + number)


def composed(texts: Sequence[str], seed: int) -> list[dict[str, str]]:
    """Documents of two texts each, one behind the other, three in four with facts. No text is in two
    documents, so that what is held out of them shows nothing that was trained on."""
    drawn = random.Random(f"documents {seed}").sample(list(texts), len(texts))
    return [
        document_of("\n\n".join(pair), random.Random(f"document {seed}/{number}"))
        for number, pair in enumerate(zip(drawn[::2], drawn[1::2], strict=False))
    ]


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Writes or reads texts, and then documents of them."""
    parser = argparse.ArgumentParser(prog="python -m retain.train.data.samples", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="smollm2-135m", help="name, folder or hub name of a chat model")
    parser.add_argument("--output", type=Path, required=True, help="jsonl that the documents are written to")
    parser.add_argument("--from", type=Path, dest="written", help="texts that were written before")
    parser.add_argument("--texts", type=int, default=280, help="how many texts, two of a document")
    parser.add_argument("--held", type=int, default=40, help="texts behind them, for OUTPUT.held.txt")
    parser.add_argument("--tokens", type=int, default=384, help="tokens of a text, at most")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    kept = given.written or given.output.with_suffix(".texts.jsonl")
    if given.written is None:
        count = given.texts + given.held
        written = sampled(given.model, texts=count, tokens=given.tokens, seed=given.seed)
        write_text(kept, _lines([{"text": text} for text in written]))
    rows = islice(read_jsonl(str(kept)), given.texts + given.held)
    texts = [row.values["text"] for row in rows]
    write_text(given.output, _lines(composed(texts[: given.texts], given.seed)))
    write_text(given.output.with_suffix(".held.txt"), "\n\n".join(texts[given.texts :]) + "\n")
    return 0


def _lines(rows: Sequence[dict[str, str]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


if __name__ == "__main__":
    raise SystemExit(main())
