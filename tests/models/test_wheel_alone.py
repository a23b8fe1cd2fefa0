"""The wheel alone, in an empty environment: the model by name, the gates that ship, and what they find.

Needles are `facts/number` of seed 0 from item 1000 on, which was written down before the gates were trained
(eval/findings/2026-11-29-real-model.md), in texts of which no document for the gates was made.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from retain.eval.tasks.encode import encode
from retain.eval.tasks.sources import load_rows
from retain.models.named import load

ROOT = Path(__file__).resolve().parents[2]
SEED, FIRST, COUNT = 0, 1000, 20
# The README's snippet, with a question that comes after the eviction.
SCRIPT = """
import json, sys
import retain
import torch

model, tokenizer = retain.load("smollm2-135m")
retain.attach(model)
found = {"full": 0, "gates": 0, "snapkv": 0}
for item in json.load(open(sys.argv[1])):
    context, whole = torch.tensor([item["context"]]), torch.tensor([item["context"] + item["question"]])
    caches = {
        "full": retain.Cache(model, policy=None),
        "gates": retain.Cache(model, keep_ratio=0.1),
        "snapkv": retain.Cache(model, policy="snapkv", keep_ratio=0.1),
    }
    for name, cache in caches.items():
        output = model.generate(whole, cache=cache.prefill(context), max_new_tokens=12, do_sample=False)
        found[name] += item["value"] in tokenizer.decode(output[0, whole.shape[1] :])
    held = {name: cache.report().total.bytes_held for name, cache in caches.items()}
    # What came after the eviction is held by all.
    assert held["gates"] < 0.16 * held["full"] and held["snapkv"] < 0.16 * held["full"], held
print(caches["gates"].report())
print(json.dumps(found))
"""


@pytest.fixture
def items(tmp_path):
    """The needles, as tokens, in prose that the gates have not seen."""
    written = ROOT / "train" / "data" / "texts" / "smollm2-135m.jsonl"
    texts = [json.loads(line)["text"] for line in written.read_text(encoding="utf-8").splitlines()[-40:]]
    haystack = tmp_path / "held.txt"
    haystack.write_text("\n\n".join(texts), encoding="utf-8")
    model, tokenizer = load("smollm2-135m")
    how = {"context_tokens": 900, "seed": SEED, "first_item": FIRST, "items": COUNT}
    made = []
    for row in load_rows("facts/number", tokenizer, **how, haystack=f"file:{haystack}"):
        encoded = encode(row, tokenizer, model)
        ids = {"context": list(encoded.context_ids), "question": list(encoded.question_ids)}
        made.append({**ids, "value": row.answers[0]})
    path = tmp_path / "items.json"
    path.write_text(json.dumps(made))
    return path


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_gates_that_ship_find_16_of_20_needles_at_a_tenth(items, tmp_path):
    source = tmp_path / "source"
    for folder in ("retain", "kernels", "train", "eval", "configs"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(tmp_path), str(source)]
    subprocess.run(pip, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    python = tmp_path / "empty" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "empty")], check=True)
    install = [str(python), "-m", "pip", "install", "-q"]
    subprocess.run([*install, "torch==2.13.0"], check=True)
    subprocess.run([*install, str(wheel)], check=True)
    script = tmp_path / "needles.py"
    script.write_text(SCRIPT)
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), str(script), str(items)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=kept)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    found = json.loads(done.stdout.splitlines()[-1])
    assert "gates: smollm2-135m (they ship with retain)" in done.stdout
    assert found["full"] >= 18 and found["gates"] >= 16, found
    assert found["snapkv"] < found["gates"], found
