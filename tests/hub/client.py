"""Runs what users run against a hub, in a process that is set up by its environment alone.

    HF_ENDPOINT=... HF_HOME=... python -m tests.hub.client FOLDER OUT

Each step is a function; OUT gets, by its name, what it returned, or the class and text of its error. No part
of a client is replaced: `HF_ENDPOINT`, `HF_HOME`, `HF_TOKEN` and `HF_HUB_OFFLINE` are what a user would set.
"""

import contextlib
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import retain
from retain.eval.tasks.sources import load_rows
from retain.hf.version_names import CACHE
from retain.models.named import commit_of, load
from retain.train.data.sources import Dataset

Step = Callable[[Path], Any]


def same(one: Any, other: Any) -> bool:
    """Whether two gates have the same weights, to the last bit."""
    left, right = one.state_dict(), other.state_dict()
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)


@contextlib.contextmanager
def token(name: str | None) -> Iterator[None]:
    before = os.environ.pop("HF_TOKEN", None)
    os.environ |= {} if name is None else {"HF_TOKEN": name}
    try:
        yield
    finally:
        os.environ.pop("HF_TOKEN", None)
        os.environ |= {} if before is None else {"HF_TOKEN": before}


def refusal(call: Callable[[], Any]) -> str:
    """Class and text of the error that a call ends in."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def first_texts(path: str, **how: Any) -> list[str]:
    """First words of all rows of a data set, the source opened again behind a third of them."""
    source = Dataset("hub", path, revision=how.get("revision"))
    rows = source.rows()
    found = [next(rows).values["text"] for _ in range(13)]
    later = Dataset("hub", path, revision=how.get("revision"))
    found += [row.values["text"] for row in later.rows(json.loads(json.dumps(source.state())))]
    return [" ".join(text.split()[:2]) for text in found]


# Gates.


def pushed_gates(folder: Path) -> Any:
    gates = retain.load_gates(folder / "gates")
    gates.metadata["license"] = "apache-2.0"
    with token("hf_owner"):
        address = gates.push_to_hub("owner/pushed", private=True, commit_message="first")
        back = retain.load_gates("owner/pushed", load("owner/tiny")[0])
    return {"address": address, "same": same(gates, back), "license": back.metadata["license"]}


def moved_gates(folder: Path) -> Any:
    from huggingface_hub import HfApi

    first = retain.load_gates("owner/moved@main")
    sha = HfApi().model_info("owner/moved").sha
    gates = retain.load_gates(folder / "gates")
    with token("hf_owner"):
        HfApi().create_tag("owner/moved", tag="v1")
        gates.push_to_hub("owner/moved")
    new = retain.load_gates("owner/moved@main")
    old = retain.load_gates(f"owner/moved@{sha}")
    return {
        "sha": sha,
        "first": same(first, retain.load_gates(folder / "moved")),
        "new": same(new, gates),
        "old": same(old, first) and same(retain.load_gates("owner/moved@v1"), first),
    }


def absent_gates(folder: Path) -> Any:
    named = {"missing": "owner/none", "revision": "owner/gates@none", "file": "owner/tiny"}
    found = {name: refusal(lambda place=place: retain.load_gates(place)) for name, place in named.items()}
    found["twice"] = refusal(lambda: retain.load_gates("owner/gates@main", revision="dev"))
    return found


def documented(folder: Path) -> Any:
    """The blocks of docs/hub.md."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "hub.md").read_text()
    scope = {"name": "owner/tiny", "folder": str(folder / "gates"), "mine": "owner/documented"}
    with token("hf_owner"), contextlib.redirect_stdout(io.StringIO()):
        for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
            exec(block, scope)
    cache: Any = scope["cache"]
    total = cache.prefill(torch.arange(10, 210)[None]).report().total
    return {
        "same": same(scope["pinned"], scope["gates"]) and same(scope["newest"], scope["gates"]),
        "evicted": total.entries_evicted,
    }


# Models and data sets.


def model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    own = AutoModelForCausalLM.from_pretrained("owner/tiny", dtype="auto", device_map=None)
    ids = AutoTokenizer.from_pretrained("owner/tiny")(
        "the old river keeps " * 40, return_tensors="pt"
    ).input_ids
    retain.attach(own)
    cache = retain.Cache(own, policy="merge", keep_ratio=0.2, gates="owner/gates")
    output = own.generate(ids, **{CACHE: cache}, max_new_tokens=4)
    total = cache.report().total
    return {
        "new": output.shape[1] - ids.shape[1],
        "held": total.entries_held / total.entries_seen,
        "commit": commit_of(own),
    }


def streams(folder: Path) -> Any:
    return {name: first_texts(f"owner/{name}") for name in ("lines", "pages")}


def moved_stream(folder: Path) -> Any:
    """A data set moves between two passes, and between a run and its resumption."""
    from huggingface_hub import CommitOperationAdd, HfApi

    source = Dataset("hub", "owner/lines")
    opened = source.rows()
    before = [next(opened).values["text"] for _ in range(3)]
    state = source.state()
    with token("hf_owner"):
        sha = (
            HfApi()
            .create_commit(
                "owner/lines",
                [CommitOperationAdd("train.jsonl", b'{"text": "quite another text"}\n' * 5)],
                commit_message="other rows",
                repo_type="dataset",
            )
            .oid
        )
    resumed = Dataset("hub", "owner/lines")
    newest = Dataset("hub", "owner/lines", revision="main")
    pinned = Dataset("hub", "owner/lines", revision=source.commit)
    return {
        "second pass": before
        == [row.values["text"] for row, _ in zip(source.rows(), range(3), strict=False)],
        "resumed": next(resumed.rows(state)).values["text"].split()[:2],
        "resumed commit": resumed.commit == source.commit != sha,
        "new": next(newest.rows()).values["text"],
        "new commit": newest.commit == sha,
        "pinned": next(pinned.rows()).values["text"] == before[0],
    }


def rows(folder: Path) -> Any:
    """Rows of tasks, from data sets of the hub."""
    del folder
    _, tokenizer = load("owner/tiny")
    ruler = load_rows("hub:simonjegou/ruler", tokenizer, data_dir="4096", only="qa_1")
    trec = load_rows("longbench/trec", tokenizer)
    return {"ruler": [len(ruler), ruler[1].answers], "trec": [len(trec), trec[1].answers]}


def hidden(folder: Path) -> Any:
    """A private model and data set without a token, then with one."""
    del folder
    calls: dict[str, Callable[[], Any]] = {
        "gates": lambda: retain.load_gates("owner/hidden"),
        "model": lambda: load("owner/hidden"),
        "stream": lambda: next(Dataset("hub", "owner/secret").rows()),
        "rows": lambda: load_rows("hub:owner/secret", None, split="train"),
    }
    with token(None):
        without = {name: refusal(call) for name, call in calls.items()}
    with token("hf_owner"):
        return {"without": without, "with": {name: refusal(call) for name, call in calls.items()}}


STEPS: tuple[Step, ...] = (
    *(pushed_gates, moved_gates, absent_gates, documented),
    *(model, streams, moved_stream, rows, hidden),
)


def main(folder: str, out: str) -> None:
    found: dict[str, Any] = {}
    for step in STEPS:
        began = time.perf_counter()
        try:
            value = step(Path(folder))
        except Exception as error:
            value = f"{type(error).__name__}: {error}"
        found[step.__name__] = value
        print(f"{step.__name__}: {time.perf_counter() - began:.2f} s", file=sys.stderr)
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
