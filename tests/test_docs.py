"""What the pages of `docs/` show runs: every Python block as it stands, and the text is right about it."""

import ast
import functools
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import retain
from retain.budget.priority_sampling import Draw
from retain.config import load
from retain.correction.merge import Merge
from retain.gates import GATES, Gate
from retain.gates.artifact import save_gates
from retain.hf.cache.cache import Cache
from retain.hf.cache.engine import Engine
from retain.hf.model.identity import fingerprint
from retain.hf.version_names import CACHE
from retain.reference import load_model
from retain.train.distill import distill
from retain.train.recipe import DistillConfig
from tests.chat import SENTENCES, chat_tokenizer
from tests.tiny import FAMILIES, tiny_batch, tiny_model

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "start": 1,
    "choose": 0,
    "train": 1,
    "fair": 0,
    "reference": 0,
    "serving": 1,
    "regimes": 9,
    "cache": 5,
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
    return (ROOT / "docs" / f"{name}.md").read_text()


def blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page(name), flags=re.DOTALL)


def shell_blocks(name: str) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", page(name), flags=re.DOTALL)


def test_every_page_and_every_block_is_run_here() -> None:
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} == set(PAGES)
    assert {name: len(blocks(name)) for name in PAGES} == PAGES
    assert all(
        page(name).count("```") == 2 * (count + len(shell_blocks(name))) for name, count in PAGES.items()
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The reference model with a tokenizer that knows turns, and untrained gates for it."""
    root = tmp_path_factory.mktemp("docs")
    model, tokenizer = load_model(0), chat_tokenizer("chatml", "words")
    # Answers as long as they are asked for, and the tokenizer's padding.
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, tokenizer.pad_token_id
    model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    save_gates(retain.new_gates(model), root / "gates", fingerprint=fingerprint(model))
    return {"name": str(root / "model"), "folder": str(root / "gates")}


class Watch:
    """What every cache of a page held after each of its forwards: the most entries of a head."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.most: list[tuple[Engine, list[int]]] = []  # engines are held, so that none takes another's place
        finish = Engine.finish

        def noted(engine: Engine) -> None:
            finish(engine)
            if all(own is not engine for own, _ in self.most):
                self.most.append((engine, []))
            held = [int(store.lengths_R.max()) for store in engine.state.stores]
            next(most for own, most in self.most if own is engine).append(max(held))

        monkeypatch.setattr(Engine, "finish", noted)

    def of(self, cache: Cache) -> list[int]:
        return next(most for own, most in self.most if own is cache.engine)


def evicts(cache: Cache) -> None:
    """Entries went, and their bytes with them."""
    total = cache.report().total
    assert total.entries_evicted > 0 and cache.evictions > 0
    assert total.bytes_held < total.bytes_full and total.bytes_allocated < total.bytes_full


@pytest.mark.always
def test_regimes(folders, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    watch, ran = Watch(monkeypatch), []
    scope = {
        **folders,
        "context": TEXT,
        "questions": ["What does INST mean to a model?", "Keep 42 lanterns; 7 ropes."],
        "said": [" ".join(SENTENCES[turn : turn + 3]) for turn in range(5)],
    }

    def step() -> Cache | None:
        exec(blocks("regimes")[len(ran)], scope)
        ran.append(scope.get("cache"))
        return ran[-1]

    step()
    context = scope["context_ids"].shape[1]
    assert context > 600
    # prefill: once, and each fork answers from the same entries.
    cache = step()
    assert cache.evictions == 1 and cache.num_seen == context and len(scope["answers"]) == 2
    assert watch.of(cache) == [round(0.2 * context)] and cache.state.regime.name == "prefill"
    evicts(cache)
    held = cache.entries_held
    # The question is forgotten, and nothing else.
    cache = step()
    assert (cache.num_seen, cache.entries_held, cache.evictions) == (context, held, 1)
    assert max(watch.of(cache)) > watch.of(cache)[0]
    # chunked: within the budget after every chunk.
    cache = step()
    assert watch.of(cache) == [128] * -(-context // 256) and len(watch.of(cache)) > 2
    assert cache.evictions == len(watch.of(cache))
    evicts(cache)
    # decode: nothing goes before 32 tokens have come; then 256 to 287 entries a head.
    cache = step()
    most = watch.of(cache)
    assert most[:32] == list(range(context, context + 32)) and len(most) == 100
    assert (min(most[32:]), max(most[32:])) == (256, 287) and cache.evictions == 3
    evicts(cache)
    # prefill+decode: budget + every - 1.
    cache = step()
    assert watch.of(cache)[0] == 128 and max(watch.of(cache)) == 128 + 15 and cache.evictions == 1 + 59 // 16
    evicts(cache)
    # chunked+decode, turn by turn: the bound holds, and all of the pinned span is there.
    cache = step()
    assert max(watch.of(cache)) == 192 + 15 and cache.evictions > 1
    evicts(cache)
    rows = [
        layer.store.row(0, head)[2][:40].tolist()
        for layer in cache.state.ragged
        for head in range(2)
        if layer.store
    ]
    assert len(rows) == 8 and all(row == list(range(40)) for row in rows)
    # admission: how much stays is the text's affair, and the recent window stays whole.
    cache = step()
    assert cache.state.bound_policy.request.budget.threshold is not None and min(watch.of(cache)) >= 32
    assert len(set(cache.budgets().held_BLH.flatten().tolist())) > 1
    evicts(cache)
    # saved and loaded: goes on as the saved one would have.
    cache = step()
    want = scope["model"].generate(scope["ids"], **{CACHE: cache}, max_new_tokens=20)
    assert torch.equal(scope["more"], want)
    assert scope["later"].entries_held == cache.entries_held and scope["later"].evictions == cache.evictions
    evicts(scope["later"])
    assert len(ran) == PAGES["regimes"]


def test_cache(folders, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    first, second, third, codes, fourth = blocks("cache")
    scope = {"name": folders["name"], "prompts": [TEXT[:1500], TEXT[:1900]]}
    exec(first, scope)
    cache = scope["cache"]
    evicts(cache)
    assert (scope["batch"].attention_mask == 0).any()
    shown = capsys.readouterr().out
    assert f"{cache.report().total.entries_held:,}" in shown and "layer 3" in shown
    report = cache.report()
    for row in re.findall(r"^\| `([^|]+)` \|", page("cache"), flags=re.MULTILINE)[:6]:
        for name in re.findall(r"\w+", row):
            assert hasattr(report, name) or hasattr(report.total, name), name
    exec(second, scope)
    base, fork, both, again = (scope[name] for name in ("base", "fork", "both", "again"))
    assert (base.batch_size, fork.batch_size, both.batch_size) == (2, 3, 4)
    assert again.entries_held == base.entries_held < both.entries_held - base.entries_held
    evicts(base)
    base.crop(base.num_seen)
    with pytest.raises(ValueError, match=r"fork\(\)"):
        base.crop(base.num_seen - 1)
    exec(third, scope)
    whole, half, mine = (scope[name] for name in ("whole", "half", "mine"))
    assert whole.entries_evicted == 0 and 0.4 < mine.entries_held / mine.entries_seen < 0.6
    assert abs(half.entries_held - half.entries_seen / 2) < 20
    exec(codes, scope)
    assert scope["notes"].entries_held == scope["base"].entries_held
    exec(fourth, scope)
    assert "use_cache=False" in capsys.readouterr().out
    assert scope["outputs"].shape[0] == 4


def test_policies(folders, capsys) -> None:
    """Every statement that makes a cache makes one that evicts."""
    setup, changes, corrections, bits, press = blocks("policies")
    scope = {**folders, "context_ids": torch.arange(3000)[None] % load_model(0).config.vocab_size}
    exec(setup, scope)
    made = []
    for statement in ast.parse(changes + corrections).body:
        line = ast.unparse(statement)
        exec(line, scope)
        if line.startswith("cache"):
            made.append(scope["cache"].prefill(scope["context_ids"]).entries_evicted)
    assert len(made) == 8 and all(made)
    for statement in ast.parse(bits).body:
        exec(ast.unparse(statement), scope)
        cache = scope["cache"].prefill(scope["context_ids"])
        assert cache.bytes_held() < cache.bytes_full() / 2
    exec(press, scope)
    evicts(scope["cache"])
    assert f"{scope['cache'].report().total.entries_held:,}" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next", "phi3"])
def test_families(family, tmp_path, capsys) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    scope = {"name": str(tmp_path), "prompt_ids": tiny_batch((0,), 60)[0]}
    for block in blocks("families"):
        exec(block, scope)
    report, layout = scope["cache"].report(), scope["layout"]
    assert report.total.entries_evicted > 0 and report.total.bytes_held < report.total.bytes_full
    assert [f"layer {idx}" for idx in layout.alone] == [left.name for left in report.alone]
    assert (len(report.alone) > 0) == (family != "phi3")
    shown = capsys.readouterr().out
    assert all(left.kind in shown for left in report.alone) and "layer" in shown


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Gates that were trained for a moment: calibrated, if nothing else is said."""
    root = tmp_path_factory.mktemp("trained")

    def train(output: str, *more: str) -> str:
        small = ["data.documents=8", "data.held_out=4", "data.max_tokens=300", f"output={root / output}"]
        small += [f"model={folders['name']}", "training.steps=2", "training.batch_documents=2", *more]
        return str(distill(load(ROOT / "configs" / "distill" / "reference.yaml", DistillConfig, small)))

    return functools.cache(train)


@pytest.mark.always
def test_fusion(folders, trained, capsys) -> None:
    """The page's block runs, and what it says of the rule is what the preset says."""
    scope = {"name": folders["name"], "folder": trained("gates"), "context_ids": torch.arange(2, 302)[None]}
    (block,) = blocks("fusion")
    exec(block, scope)
    evicts(scope["cache"])
    assert f"{scope['cache'].report().total.entries_held:,}" in capsys.readouterr().out
    policy = scope["cache"].state.bound_policy.request.policy
    assert policy == retain.load_policy("merge") and scope["gates"].unit == "risk"
    chosen = {name: getattr(policy, name) for name in ("correction", "draw", "name", "regime")}
    assert policy == replace(retain.load_policy("fused"), **chosen)
    merged = re.search(
        r"cosine is at least ([\d.]+) and the kept one is none of the last (\d+)", page("fusion")
    )
    assert merged and policy.correction == Merge(float(merged[1]), recent=int(merged[2]), count=True)
    assert (policy.fusion, policy.scope, policy.floor) == ("learned", "model", None)
    assert policy.draw == Draw(0.35) and retain.load_policy("fused").draw == Draw(0.2)
    assert "until 65 % of the budget behind the protected entries are full (`fused`: four fifths)" in page(
        "fusion"
    )
    said = re.search(r"The first (\d+) and the last (\d+) entries stay", page("fusion"))
    kept = policy.protection
    assert said and [int(count) for count in said.groups()] == [kept.sinks, kept.recent]
    assert (kept.prefix_fraction, kept.suffix_fraction, kept.minimum) == (0, 0, 0)
    window = re.search(r"j in the last (\d+) queries", page("fusion"))
    assert window and int(window.group(1)) == policy.observed_settings["window"]


def test_gates(folders, trained) -> None:
    """The page is about what can be done with them."""
    scope = {
        "name": folders["name"],
        "folder": trained("gates"),
        "context_ids": torch.arange(2, 302)[None],
    }
    first, second, third = blocks("gates")
    exec(first, scope)
    assert scope["gates"].unit == "risk"
    evicts(scope["cache"])
    exec(second, scope)
    for name in ("fused", "blended"):
        evicts(scope[name])
    exec(third, scope)
    evicts(scope["adaptive"])


def test_the_page_of_gates_is_right_about_every_family() -> None:
    rows = [row.split(" | ") for row in re.findall(r"^\| (`.*) \|$", page("gates"), re.MULTILINE)]
    named = {family: row for row in rows for family in re.findall(r"`(\w+)`", row[0])}
    assert named.keys() == GATES.keys()
    for family, (_, _, _, _, trained, again) in named.items():
        gate = GATES[family]
        assert ("end to end" in trained) == (gate.log_gate is not Gate.log_gate), family
        assert (again == "yes") == (not gate.contextual), family


def test_the_table_of_families_is_the_table_of_the_code() -> None:
    from retain.hf.model.families import FAMILIES as TABLE

    named = re.findall(r"^\| [^|]+ \| (`[^|]+`) \|", page("families"), flags=re.MULTILINE)[1:]
    assert {name for cell in named for name in re.findall(r"`(\w+)`", cell)} == set(TABLE)
    assert set(TABLE) - {"qwen3_5_moe_text"} == {config().model_type for config, _, _ in FAMILIES.values()}


def test_start(capsys) -> None:
    scope: dict = {}
    exec(*blocks("start"), scope)
    evicts(scope["cache"])
    assert f"{scope['cache'].report().total.entries_held:,}" in capsys.readouterr().out
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"^\| `([\w-]+)` \|", page("start"), flags=re.MULTILINE)
    assert len(named) == 6 and set(named) <= set(extras)


def test_train(folders, capsys) -> None:
    scope = {"context_ids": torch.arange(2, 302)[None], **folders}
    exec(*blocks("train"), scope)
    evicts(scope["cache"])
    assert f"{scope['cache'].report().total.entries_held:,}" in capsys.readouterr().out


def test_commands_of_the_pages_name_what_exists() -> None:
    lines = [line for name in PAGES for block in shell_blocks(name) for line in block.splitlines()]
    assert len(lines) >= 6
    makefile = (ROOT / "Makefile").read_text()
    for line in lines:
        for target in re.findall(r"^make ([\w-]+)", line):
            assert re.search(rf"^[^\t#=]*\b{target}\b[^=\n]*:", makefile, flags=re.MULTILINE), line
        for path in re.findall(r"(?:configs|train|eval)/[\w/]+\.(?:yaml|py)", line):
            assert (ROOT / path).is_file(), line


def test_every_figure_of_the_choice_is_in_the_entry_that_its_row_names() -> None:
    rows = re.findall(
        r"^\| (.*) \| \[[^\]]+\]\(\.\./(eval/findings/[\w.-]+)\) \|$", page("choose"), re.MULTILINE
    )
    assert len(rows) == page("choose").count("(../eval/findings/") == 9
    missing = []
    for row, entry in rows:
        own, given = re.sub(r"`[^`]*`", "", row), (ROOT / entry).read_text()
        found = re.findall(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?![\w.]*\d)", own)
        assert found, row
        missing += [
            f"{entry}: {figure}"
            for figure in found
            if not re.search(rf"(?<![\d.]){re.escape(figure)}(?!\.?\d)", given)
        ]
    assert missing == []


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


def test_the_page_of_findings_is_short_and_links_every_entry() -> None:
    text = (ROOT / "eval" / "FINDINGS.md").read_text()
    assert len(text.split()) <= 1500
    listed = text.partition("## All entries")[2]
    entries = {
        path.name
        for path in (ROOT / "eval" / "findings").glob("*.md")
        if re.match(r"# .*\n\n\d{4}-\d\d-\d\d", path.read_text())
    }
    assert set(re.findall(r"\]\(findings/([^)]+)\)", listed)) == entries


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
