"""Fills the hub of the tests: a tiny Llama with a tokenizer, gates for it, data sets of texts and tasks."""

import io
import json
import random
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import retain
from retain.gates.artifact import save_gates
from retain.hf.model.identity import fingerprint
from retain.reference import load_tokenizer
from tests.hub.server import Hub

WORDS = ("the", "a", "river", "lantern", "old", "keeps", "seven", "ropes", "under", "bridge", "north", "of")


def files(folder: Path) -> dict[str, bytes]:
    """Files of a folder, as a commit takes them."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def tiny_llama(*, hidden_size: int = 32, head_dim: int = 8) -> Any:
    """A random Llama of two layers with the vocabulary of the reference tokenizer."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=3072,
            hidden_size=hidden_size,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=head_dim,
            max_position_embeddings=16384,
            bos_token_id=1,
            eos_token_id=2,
        )
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def texts(count: int, *, words: int = 90) -> list[dict[str, str]]:
    draw = random.Random(0)
    return [{"text": f"Text {n}. " + " ".join(draw.choices(WORDS, k=words))} for n in range(count)]


def jsonl(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    written = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), written)
    return written.getvalue()


def fill(hub: Hub, folder: Path) -> None:
    """Commits everything to the hub; its folders stay in `folder`, by the names of the repositories."""
    model = tiny_llama()
    model.save_pretrained(folder / "tiny")
    load_tokenizer().save_pretrained(folder / "tiny")
    for name, private in (("tiny", False), ("hidden", True)):
        hub.commit("models", f"owner/{name}", files(folder / "tiny"), private=private)
    for seed, name in enumerate(("gates", "moved")):
        gates = retain.new_gates(model, seed=seed)
        record = {"base_model": "owner/tiny", "target": {"horizon": 8}, "loss": {"terms": {"mse": 1.0}}}
        save_gates(gates, folder / name, fingerprint=fingerprint(model), metadata=record)
        hub.commit("models", f"owner/{name}", files(folder / name))
    rows = texts(40)
    halves = {f"data/train-0000{n}-of-00002.parquet": parquet(rows[20 * n :][:20]) for n in range(2)}
    hub.commit("datasets", "owner/lines", {"train.jsonl": jsonl(rows)})
    hub.commit("datasets", "owner/pages", halves)
    hub.commit("datasets", "owner/secret", {"train.jsonl": jsonl(rows)}, private=True)
    _fill_benchmarks(hub)


def _fill_benchmarks(hub: Hub) -> None:
    """Small data sets under the names, with the files and columns, that tasks ask for."""
    asked = [
        {
            **{"context": f"One more than {n} is {n + 1}.", "question": f"What is {n} + 1?", "task": "qa_1"},
            **{"answer": [str(n + 1)], "answer_prefix": "Answer:", "max_new_tokens": 32},
        }
        for n in range(4)
    ]
    hub.commit("datasets", "simonjegou/ruler", {"4096/test-00000-of-00001.parquet": parquet(asked)})
    rows = [
        {
            **{"input": "Which river?", "context": " ".join(one["text"] for one in texts(3)), "length": 270},
            **{"answers": ["north"], "all_classes": ["north", "south"], "_id": str(number)},
        }
        for number in range(3)
    ]
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("data/trec.jsonl", jsonl(rows))
    # A loading script, which `datasets` no longer runs, lies beside it there too.
    hub.commit("datasets", "THUDM/LongBench", {"data.zip": zipped.getvalue(), "LongBench.py": b"import x\n"})
