"""README.md and the pages of `docs/` run, block by block, and the text is right."""

import ast
import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import retain
from retain.config import load
from retain.gates.artifact import save_gates
from retain.hf.cache.cache import Cache
from retain.hf.model.identity import fingerprint
from retain.reference import load_model
from retain.train.distill import distill
from retain.train.recipe import DistillConfig
from tests.chat import SENTENCES, chat_tokenizer
from tests.tiny import tiny_batch, tiny_model

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PAGES = {
    "README": 2,
    "start": 1,
    "choose": 0,
    "train": 1,
    "fair": 0,
    "reference": 0,
    "serving": 1,
    "when": 9,
    "cache": 4,
    "families": 2,
    "gates": 3,
    "hub": 2,
    "versions": 0,
    "fusion": 1,
    "lm_eval": 0,
    "policies": 5,
    "methods": 0,
}
TEXT = "\n".join(f"{number}. {SENTENCES[number % len(SENTENCES)]}" for number in range(45))


def page(name: str) -> str:
    return (ROOT / ("" if name == "README" else "docs") / f"{name}.md").read_text()


def blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page(name), flags=re.DOTALL)


def shell_blocks(name: str) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", page(name), flags=re.DOTALL)


def test_every_page_and_every_block_is_run_here() -> None:
    assert {"README", *(path.stem for path in (ROOT / "docs").glob("*.md"))} == set(PAGES)
    assert {name: len(blocks(name)) for name in PAGES} == PAGES
    assert all(
        page(name).count("```") == 2 * (count + len(shell_blocks(name)))
        for name, count in PAGES.items()
        if name != "README"
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The reference model with a tokenizer that knows turns, and untrained gates for it."""
    root = tmp_path_factory.mktemp("docs")
    model, tokenizer = load_model(), chat_tokenizer("chatml", "words")
    # Answers as long as they are asked for, and the tokenizer's padding.
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, tokenizer.pad_token_id
    model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    save_gates(retain.new_gates(model), root / "gates", fingerprint=fingerprint(model))
    return {"name": str(root / "model"), "folder": str(root / "gates")}


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Gates that were trained for a moment: calibrated, if nothing else is said."""
    root = tmp_path_factory.mktemp("trained")

    def train(output: str, *more: str) -> str:
        small = ["data.documents=8", "data.held_out=4", "data.max_tokens=300", f"output={root / output}"]
        small += [f"model={folders['name']}", "training.steps=2", "training.batch_documents=2", *more]
        return str(distill(load(ROOT / "configs" / "distill" / "reference.yaml", DistillConfig, small)))

    return functools.cache(train)


def caches_of(name: str, scope: dict) -> list[Cache]:
    """Run the blocks of a page, statement by statement; every cache that a name stood for on the way."""
    made: dict[int, Cache] = {}
    for block in blocks(name):
        for statement in ast.parse(block).body:
            exec(compile(ast.Module([statement], []), f"{name}.md", "exec"), scope)
            made |= {id(each): each for each in scope.values() if isinstance(each, Cache)}
    return list(made.values())


# One function: of a grid the default tier would run a single page. Blocks of hub.md: tests/gates/test_hub.py.
@pytest.mark.always
def test_the_blocks_of_every_page_run_and_what_they_cache_takes_less_memory(
    folders, trained, monkeypatch, tmp_path, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_model("gemma3").save_pretrained(tmp_path / "gemma3")
    ids = torch.arange(3000)[None] % load_model().config.vocab_size
    prompt = {**folders, "context_ids": ids[:, :1200]}
    learned = {**prompt, "folder": trained("gates")}
    said = [" ".join(SENTENCES[turn : turn + 3]) for turn in range(5)]
    chat = {
        "context": TEXT,
        "questions": ["What does INST mean to a model?", "Keep 42 lanterns."],
        "said": said,
    }
    for name, scope in {
        "README": {**folders, "prompt": "import os\n" * 100, "context_ids": ids},
        **{"start": {}, "train": prompt, "policies": prompt, "gates": learned, "fusion": learned},
        "when": {**folders, **chat},
        "cache": {**folders, "prompts": [TEXT[:1500], TEXT[:1900]]},
        "families": {"name": str(tmp_path / "gemma3"), "prompt_ids": tiny_batch((0,), 60)[0]},
    }.items():
        scope = dict(scope)
        caches = caches_of(name, scope)
        assert len(caches) >= len(blocks(name)) - 2, name
        for cache in caches:
            cache = cache if cache.num_seen else cache.prefill(scope["context_ids"])
            whole = cache is scope.get("whole")  # which holds evidence for its forks
            assert (cache.bytes_held() < cache.report().total.bytes_full) != whole, (name, cache)
    assert "use_cache=False" in capsys.readouterr().out
    assert scope["cache"].report().alone


def test_the_tree_of_the_readme_is_the_tree() -> None:
    _, tree, _ = re.split(r"## The tree\n\n```\n(.*?)```", README, flags=re.DOTALL)
    named, top = set(), ""
    for line in tree.splitlines():
        room = line.split("/ ")[0] + "/"
        top = "" if room[0] != " " else top
        named.add(top + room.strip())
        top = top or room
    packages = {
        path.parent for name in ("retain", "train", "eval") for path in (ROOT / name).rglob("__init__.py")
    }
    rooms = {f"{path.relative_to(ROOT)}/" for path in packages if path != ROOT / "retain" / "hf"}
    assert named == rooms | {"kernels/", "configs/", "docs/", "tests/", "eval/findings/"}


def markdown() -> list[Path]:
    """Markdown of the repository; of the golden report only the text is committed, not its picture."""
    folders = [ROOT / name for name in ("configs", "docs", "eval", "kernels", "retain", "tests", "train")]
    pages = [*ROOT.glob("*.md"), *(path for folder in folders for path in sorted(folder.rglob("*.md")))]
    return [path for path in pages if path.parent != ROOT / "tests" / "golden" / "report"]


def links(text: str) -> list[str]:
    """Targets of relative links, outside of code."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    return [to for to in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"\w+:|#", to)]


def test_every_relative_link_leads_to_a_file() -> None:
    pages = {path: links(path.read_text()) for path in markdown()}
    assert len(pages) > 30 and sum(map(len, pages.values())) > 100
    missing = [
        f"{path.relative_to(ROOT)}: {to}"
        for path, targets in pages.items()
        for to in targets
        if not (path.parent / to.partition("#")[0]).exists()
    ]
    assert missing == []


def test_modules_that_are_named_exist() -> None:
    """Files and modules named in the pages; entries of findings keep the names of their day, and files that a
    recipe of CONTRIBUTING.md writes are its own test's. CHANGELOG.md also names what is gone."""
    dated = {"findings", "benchmarks"}
    pages = [
        path
        for path in markdown()
        if path.parent.name not in dated and path.name not in {"CHANGELOG.md", "CONTRIBUTING.md"}
    ]
    missing = []
    for path in pages:
        text = path.read_text()
        files = set(re.findall(r"`((?:retain|tests|train|eval|kernels)/[\w/]+\.py)`", text))
        missing += [f"{path.name}: {name}" for name in sorted(files) if not (ROOT / name).exists()]
        for name in sorted(set(re.findall(r"python -m retain\.((?:\w+\.)*\w+)", text))):
            parts = name.split(".")
            base = ROOT if parts[0] in {"kernels", "train", "eval"} else ROOT / "retain"
            found = base.joinpath(*parts)
            if not found.with_suffix(".py").exists() and not (found / "__main__.py").exists():
                missing.append(f"{path.name}: python -m retain.{name}")
    assert missing == []
