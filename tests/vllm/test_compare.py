"""A comparison through engines of vLLM gives the rows of `retain.Cache` with the same pages.

Every command runs in a process of its own, since engines change the classes of transformers in theirs. The
last step needs the packages of the extra `eval` beside vLLM.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from retain.eval.run.results_store import read_rows

for package in ("vllm", "matplotlib", "pyarrow", "scipy", "jinja2"):
    pytest.importorskip(package)

ROOT = Path(__file__).resolve().parents[2]
MAKE_GATES = """
import sys
import retain
from retain.gates.artifact import save_gates
from retain.hf.model.identity import fingerprint
from retain.reference import load_model
model = load_model(0)
save_gates(retain.new_gates(model, "linear", seed=0), sys.argv[1], fingerprint=fingerprint(model))
"""
# What is held, and what is answered from it.
SAME = ("kept_entries", "seen_entries", "bytes_held", "bytes_full", "needles_kept", "attended_ratio", "score")
SAME += ("keep_ratio", "peak_entries", "num_prompt", "gates", "trained", "null", "text")


def run(*typed: str) -> str:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, *typed], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Rows of both engines, by cell and item, and what the commands printed."""
    folder = tmp_path_factory.mktemp("compared")
    run("-c", MAKE_GATES, str(folder / "gates-seed0"))
    settings = ["tasks=[multiquery, tracing]", "items_per_task=10", "keep_ratios=[0.1]", "batch_items=10"]
    settings += [f"results={folder}", f"gates={folder}/gates-seed{{seed}}"]
    entry = ["eval/compare.py", "--config", "configs/compare/serving.yaml"]
    printed = run(*entry, *settings, "run=vllm")
    run(*entry, *settings, "run=hf", "engine=hf", "engine_settings={}")
    rows = {
        name: {
            (row["task"], row["item"], row["policy"], row["budget"]): row for row in read_rows(folder / name)
        }
        for name in ("vllm", "hf")
    }
    return rows["vllm"], rows["hf"], folder, printed


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_rows_are_those_of_caches_with_the_same_pages(runs):
    served, cached, _, _ = runs
    assert served.keys() == cached.keys() and len(served) == 2 * 10 * 3
    differ = [cell for cell in served if served[cell]["tokens"] != cached[cell]["tokens"]]
    # Two numbers that are added up in another order decide a tie otherwise; none was seen.
    assert len(differ) <= 1, differ
    for cell in set(served) - set(differ):
        assert {name: served[cell][name] for name in SAME} == {name: cached[cell][name] for name in SAME}
    assert {row["keep_ratio"] < 0.14 for row in served.values() if row["policy"] != "full"} == {True}
    assert len({row["needles_kept"] for row in served.values()}) > 5


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_report_has_the_policies_beside_the_engines_own_full_cache(runs):
    _, _, folder, printed = runs
    table = printed[printed.index("| policy | served 0.1") :]
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:5]] == ["full", "snapkv", "fused"]
    for name in ("report.md", "report.html", "items.parquet"):
        assert (folder / "vllm" / name).is_file()
