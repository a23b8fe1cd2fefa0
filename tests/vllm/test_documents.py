"""Documents that are compressed once and shared, through an engine: equal to `retain.Cache` that reads the
document, is cut, and goes on; by least recent use; to files and from files; and nothing is left behind.

Engines are made by fixtures alone, one at a time; what transformers answers comes from another process.
"""

import gc
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from retain.cache.file_format import read_file, write_file
from tests.vllm import offline
from tests.vllm.engine import PAGE, Run, make_engine

pytest.importorskip("vllm")
# vLLM's own warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

SETTINGS = {"policy": "snapkv", "keep_ratio": 0.25}
CACHE = {**SETTINGS, "page": PAGE}
NEW, LONG = 24, 150

# File -> how its document was compressed, where that is why it is refused, or what is done to the file.
REFUSED_AT_START = {"policy": {**CACHE, "policy": "tova"}, "page": {**CACHE, "page": 16}}
BROKEN = ("truncated", "foreign", "flipped", "heads", "model")
REFUSED = (*REFUSED_AT_START, *BROKEN)


def write_document(number: int, length: int) -> list[int]:
    """Token ids of a document."""
    from retain.reference.documents import Writer
    from retain.reference.items import write_item

    return [*map(int, write_item(Writer("eval", number), "multikey", length)[0])]


def write_question(number: int) -> list[int]:
    """Token ids of a question."""
    from retain.reference.documents import Writer
    from retain.reference.items import write_item

    return [*map(int, write_item(Writer("eval", number), "multikey", 400)[1].ids)]


DOCUMENT = write_document(7, 1000)
PAGES = len(DOCUMENT) // PAGE
KEPT = -(-PAGES // 4)
QUESTIONS = [write_question(50 + place) for place in range(12)]
TEXTS = {name: write_document(100 + place, 420) for place, name in enumerate(("offline", "engine", *REFUSED))}


def whole_pages(document: list[int]) -> int:
    """Tokens of a document's full pages."""
    return len(document) // PAGE * PAGE


class Offline:
    """What transformers answers."""

    def __init__(self, folder: Path):
        self.folder, self.model, self.other = folder, str(folder / "model"), str(folder / "other")
        self.documents = folder / "documents"
        self.documents.mkdir()
        case = {"model": self.model, "cache": CACHE, "new": NEW}
        cut = {"document": whole_pages(DOCUMENT)}
        tasks: dict[str, dict[str, Any]] = {
            "make model": {"make": 0, "model": self.model},
            "make other": {"make": 1, "model": self.other},
        }
        for place, question in enumerate(QUESTIONS):
            new = LONG if place < 8 else NEW
            tasks[f"q{place}"] = {**case, **cut, "prompt": DOCUMENT + question, "new": new}
        tasks["alone"] = {**case, "prompt": DOCUMENT + QUESTIONS[0]}
        tasks["half"] = {**case, "cache": {**CACHE, "keep_ratio": 0.5}, "prompt": DOCUMENT + QUESTIONS[0]}
        tasks["full"] = {**case, "cache": {"policy": None}, "prompt": DOCUMENT + QUESTIONS[0]}
        for name, text in TEXTS.items():
            prompt = text + QUESTIONS[0]
            shared = {} if name in REFUSED else {"document": whole_pages(text)}
            tasks[name] = {**case, **shared, "prompt": prompt}
            if name != "engine":
                file = {"save": self.file(name), "cache": REFUSED_AT_START.get(name, CACHE)}
                model = self.other if name == "model" else self.model
                tasks[f"save {name}"] = {**file, "model": model, "document": text[: whole_pages(text)]}
        self.answers = dict(zip(tasks, offline.ask(list(tasks.values()), folder), strict=True))
        self._break()

    def file(self, name: str) -> str:
        """Path of a document's file."""
        return str(self.documents / f"{name}.safetensors")

    def _break(self) -> None:
        """Do to files what they are refused for."""
        path = Path(self.file("truncated"))
        path.write_bytes(path.read_bytes()[:-100])
        Path(self.file("foreign")).write_bytes(b"no cache" * 20)
        path = Path(self.file("flipped"))
        data = bytearray(path.read_bytes())
        data[-8] ^= 1
        path.write_bytes(bytes(data))
        # Sound by its digest, and of a model with one KV head.
        path = Path(self.file("heads"))
        header, tensors = read_file(path)
        for name in list(tensors):
            if name.endswith("store.lengths"):
                tensors[name] = tensors[name].sum(0, keepdim=True)
        write_file(path, header, tensors.items())

    def tokens(self, name: str) -> list[int]:
        """Answer to a case."""
        return self.answers[name]["tokens"]


class Counted(Run):
    """A run that reads the engine's counters."""

    def __init__(self, llm: Any):
        super().__init__(llm)
        self.free = self.pool.num_gpu_blocks - 1
        self.counters: Counter[str] = Counter()
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.connector, self.worker = self.scheduler.connector, get_kv_transfer_group().worker
        self.read()
        self.before = Counter(self.counters)

    def read(self) -> None:
        """Take the counters of the scheduler's side and of the worker's."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        for connector in (self.connector, get_kv_transfer_group()):
            self.counters.update(connector.stats.data)
            connector.stats.data.clear()

    def step(self) -> None:
        taken = []
        kept = self.connector.get_kv_connector_stats
        self.connector.get_kv_connector_stats = lambda: taken.append(kept()) or None
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        group = get_kv_transfer_group()
        worker_kept = group.get_kv_connector_stats
        group.get_kv_connector_stats = lambda: taken.append(worker_kept()) or None
        try:
            super().step()
        finally:
            del self.connector.get_kv_connector_stats, group.get_kv_connector_stats
        for stats in taken:
            if stats is not None:
                self.counters.update(stats.data)

    def one(self, prompt: list[int], new: int = NEW, **sampling: Any) -> list[int]:
        """The answer to one request."""
        name = f"r{len(self.answers)}"
        self.add(name, prompt, new, **sampling)
        self.finish()
        return self.answers[name]

    def make(self, document: list[int], name: str | bool = True) -> None:
        """Compress a document, and save it under a name."""
        self.one(document, 1, extra_args={"retain.document": name})

    def documents_held(self) -> int:
        """Blocks of the documents in the pool."""
        return sum(len(document.blocks) for document in self.connector.documents.pooled.values())

    def reset(self) -> None:
        """Drop all documents, and tell the workers."""
        assert self.connector.reset_cache()
        self.one([5] * 8, 1)
        self.counters.clear()


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Offline:
    return Offline(tmp_path_factory.mktemp("documents"))


@pytest.fixture(scope="module")
def engine() -> Iterator[Callable[..., Any]]:
    """An engine, the last one if it is asked for again."""
    made: dict[str, Any] = {}

    def stop() -> None:
        for llm in made.values():
            llm.llm_engine.engine_core.shutdown()
        made.clear()
        gc.collect()

    def get(model: str, retain: dict[str, Any], **settings: Any) -> Any:
        key = json.dumps([model, retain, settings])
        if key not in made:
            stop()
            made[key] = make_engine(model, retain, **settings)
        return made[key]

    yield get
    stop()


@pytest.fixture
def large(outside: Offline, engine: Callable[..., Any]) -> Counted:
    """An engine with room, and a folder of documents."""
    run = Counted(engine(outside.model, {**SETTINGS, "documents": str(outside.documents)}))
    run.reset()
    return run


@pytest.fixture
def small(outside: Offline, engine: Callable[..., Any]) -> Counted:
    """An engine with 47 blocks, of which unused documents may hold 16."""
    run = Counted(
        engine(
            outside.model,
            {**SETTINGS, "document_blocks": 16},
            kv_cache_memory_bytes=48 * 4 * 2 * PAGE * 64 * 2 * 4,
            max_model_len=1408,
            max_num_batched_tokens=512,
        )
    )
    run.reset()
    return run


def test_what_does_not_fit_is_refused_at_the_start(outside: Offline, engine: Callable[..., Any]) -> None:
    run = Counted(engine(outside.model, {**SETTINGS, "documents": str(outside.documents)}))
    assert run.before["documents_refused"] == len(REFUSED_AT_START) + 2


def test_twelve_questions_on_one_document(outside: Offline, large: Counted) -> None:
    for place, question in enumerate(QUESTIONS):
        large.add(f"alone{place}", DOCUMENT + question, NEW)
    large.finish()
    alone, large.most_held = large.most_held, 0
    large.make(DOCUMENT)
    assert large.held == large.documents_held() == KEPT
    large.most_held = 0
    for place, question in enumerate(QUESTIONS):
        large.add(f"q{place}", DOCUMENT + question, NEW)
    large.finish()
    for place in range(len(QUESTIONS)):
        assert large.answers[f"q{place}"] == outside.tokens(f"q{place}")[:NEW], place
    assert large.most_held == KEPT + large.most_running * 2 < alone / 6
    assert large.held == KEPT
    assert large.counters["documents_used"] == 12 and large.counters["documents_compressed"] == 1
    assert not any(
        block.block_hash for one in large.connector.documents.pooled.values() for block in one.blocks
    )


def test_who_may_use_it(outside: Offline, large: Counted) -> None:
    """The longest one, of the same budget; who asks for a full cache uses none."""
    large.make(DOCUMENT[: 20 * PAGE])
    large.make(DOCUMENT)
    assert large.counters["documents_compressed"] == 2
    assert large.one(DOCUMENT + QUESTIONS[0]) == outside.tokens("q0")[:NEW]
    prompt = DOCUMENT + QUESTIONS[0]
    assert large.one(prompt, extra_args={"retain.keep_ratio": 0.5}) == outside.tokens("half")
    assert large.one(prompt, extra_args={"retain.off": True}) == outside.tokens("full")
    assert large.counters["documents_used"] == 1
    # The document again: it is there, and what is behind its full pages is computed.
    large.make(DOCUMENT)
    assert large.counters["documents_compressed"] == 2 and large.counters["documents_used"] == 2
    # No token more than the document: nothing would be left to compute.
    large.one(DOCUMENT[: PAGES * PAGE], 1, extra_args={"retain.keep_ratio": 0.25})
    assert large.counters["documents_used"] == 3, "the shorter one"
    large.reset()
    assert large.held == 0 and not large.worker.documents
    assert large.one(prompt) == outside.tokens("alone")


def test_a_file_that_was_made_offline(outside: Offline, large: Counted) -> None:
    prompt = TEXTS["offline"] + QUESTIONS[0]
    assert large.one(prompt) == outside.tokens("offline")
    assert large.one(prompt) == outside.tokens("offline")
    assert large.counters["documents_loaded"] == 1 and large.counters["documents_used"] == 2
    large.reset()
    assert large.held == 0
    assert large.one(prompt) == outside.tokens("offline"), "it is read again"
    assert large.counters["documents_loaded"] == 1


def test_a_file_that_the_engine_makes(outside: Offline, large: Counted, tmp_path: Path) -> None:
    text = TEXTS["engine"]
    large.make(text, "engine")
    assert large.counters["documents_saved"] == 1
    assert large.one(text + QUESTIONS[0]) == outside.tokens("engine")
    rest = text[whole_pages(text) :] + QUESTIONS[0]
    task = {"load": outside.file("engine"), "model": outside.model, "rest": rest, "new": NEW}
    (after,) = offline.ask([task], tmp_path)
    assert after["tokens"] == outside.tokens("engine")
    # Back from its file, and once more into another one.
    large.reset()
    large.make(text, "again")
    assert large.counters["documents_loaded"] == 1 and large.counters["documents_saved"] == 1
    (_, first), (_, second) = read_file(Path(outside.file("engine"))), read_file(Path(outside.file("again")))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name in ("../away", "engine", "a b"):
        large.make(DOCUMENT, name)
    assert large.counters["documents_refused"] == 3
    assert not (outside.documents.parent / "away.safetensors").exists()


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_file_changes_nothing(outside: Offline, large: Counted, name: str) -> None:
    assert large.one(TEXTS[name] + QUESTIONS[0]) == outside.tokens(name)
    at_start = (*REFUSED_AT_START, "truncated", "foreign")
    # The start's are refused anew by each reset, which looks at the folder again; before the counters were.
    assert large.counters["documents_refused"] == (name not in at_start)
    assert large.counters["documents_loaded"] == 0 and large.held == 0


def test_least_recent_use(outside: Offline, small: Counted) -> None:
    documents = [write_document(200 + place, 900) for place in range(3)]
    small.make(documents[0])
    small.make(documents[1])
    assert small.counters["documents_dropped"] == 0 and small.held == small.documents_held() <= 16
    small.one(documents[0] + QUESTIONS[0])
    small.make(documents[2])
    assert small.counters["documents_dropped"] == 1
    small.counters.clear()
    for document, used in zip(documents, (1, 0, 1), strict=True):
        small.one(document + QUESTIONS[0])
        assert small.counters["documents_used"] == used
        small.counters.clear()
    assert small.held == small.documents_held()


def test_a_short_pool_takes_documents_that_nobody_uses(outside: Offline, small: Counted) -> None:
    small.make(write_document(201, 900))
    small.make(DOCUMENT)
    small.one(DOCUMENT + QUESTIONS[0])
    held = small.held
    assert held > 8
    answer = small.one((DOCUMENT * 2)[:1180], 4, extra_args={"retain.off": True})
    assert len(answer) == 4
    assert small.counters["documents_dropped"] == 1 and small.held == KEPT
    assert small.one(DOCUMENT + QUESTIONS[0]) == outside.tokens("q0")[:NEW]
    assert small.counters["documents_used"] == 2


def test_preempted_requests_take_their_document_again(outside: Offline, small: Counted) -> None:
    small.make(DOCUMENT)
    for place in range(8):
        small.add(f"q{place}", DOCUMENT + QUESTIONS[place], LONG)
    small.finish()
    assert small.preempted, "the pool is short"
    for place in range(8):
        assert small.answers[f"q{place}"] == outside.tokens(f"q{place}"), place
    assert small.counters["documents_used"] == 8 + sum(small.preempted.values())
    assert small.held == KEPT


def test_nothing_is_left_behind(small: Counted) -> None:
    """Aborts at every stage, of makers and users, while the pool is short."""
    generator = torch.Generator().manual_seed(0)
    documents = [write_document(300 + place, 700) for place in range(4)]
    for place in range(60):
        document = documents[int(torch.randint(4, (), generator=generator))]
        kind = int(torch.randint(4, (), generator=generator))
        if kind == 0:
            small.add(f"x{place}", document, 2, extra_args={"retain.document": True})
        else:
            small.add(f"x{place}", document + QUESTIONS[place % 12], 20)
        if kind == 1:
            small.add(f"n{place}", document + QUESTIONS[0], 20, n=2, temperature=1)
        for _ in range(int(torch.randint(6, (), generator=generator))):
            small.step()
        if kind == 2:
            small.engine.abort_request([f"x{place}"])
    small.finish()
    small.step()
    assert small.counters["documents_used"] > 5 and small.counters["documents_dropped"] > 0
    assert small.held == small.documents_held() <= 16
    known = small.connector
    assert not known.documents.asks and not known.options and not known.manager.progress
    assert not known.announced and not known.opened
    assert small.worker.documents.keys() == {one.serial for one in known.documents.pooled.values()}
    small.reset()
    assert small.held == 0 and not small.worker.documents and not small.worker.arrivals
