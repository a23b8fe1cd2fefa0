"""Sets up every test: offline, one thread, the same seed, deterministic algorithms, checked shapes.

The environment is set before torch, transformers or triton is imported, since each reads it once. The import
hook makes jaxtyping check every annotated function of `retain` through beartype; users never pay for that.
"""

import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_MODE"] = "disabled"
os.environ["MPLBACKEND"] = "Agg"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# deepspeed compiles an extension in a folder that all environments share: another version in it is compiled
# anew, and behind the lock of a build that was killed tests wait until their time is over.
if sys.prefix != sys.base_prefix:
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", f"{sys.prefix}/torch_extensions")

import jaxtyping
import pytest
import torch

from tests import tiers

ROOT = Path(__file__).resolve().parents[1]

# Not `retain.kernels`: Triton compiles the source of a kernel, and a checking wrapper is no part of it. Not
# `retain.config`, which has no shapes, and reads thousands of configs while tests are collected.
_CHECKED = sorted(
    f"retain.{path.stem}"
    for path in (ROOT / "retain").iterdir()
    if path.stem.isidentifier() and path.stem != "config"
)
# A machine that is there for its GPU may lack beartype; then the head of the report says so.
_CAN_CHECK = importlib.util.find_spec("beartype") is not None
if _CAN_CHECK:
    jaxtyping.install_import_hook([*_CHECKED, "retain.train", "retain.eval"], "beartype.beartype")


def pytest_report_header() -> list[str]:
    return [] if _CAN_CHECK else ["shapes are NOT checked: beartype is not installed"]


def pytest_configure(config: pytest.Config) -> None:
    # One process either interprets kernels or compiles them: which, Triton reads once. `-m gpu` compiles.
    if not torch.cuda.is_available() or config.option.markexpr != "gpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    early = sorted(name for name in sys.modules if name.startswith("retain."))
    assert not early, f"imported before the shape-checking hook was installed: {early}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"skipped tests: {len(terminalreporter.stats.get('skipped', []))}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also slow tests, and every case of every grid")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.option.all:
        items[:], left_out = tiers.choose(items)
        config.hook.pytest_deselected(items=left_out)
    if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return
    reason = (
        "kernels are interpreted here: run -m gpu" if torch.cuda.is_available() else "needs a CUDA device"
    )
    # How many is printed in the end (above), so that nobody takes them for passed.
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    # Benchmarks collect garbage before each case: without this, they search all that the imports have made.
    gc.freeze()


@pytest.fixture(autouse=True)
def _reproducible(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seed torch and numpy; on the CPU also demand determinism, which fills `torch.empty` with NaN."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    torch.use_deterministic_algorithms(request.node.get_closest_marker("gpu") is None)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def heads_file(tmp_path_factory) -> str:
    """Weights of three layers of two heads."""
    path = tmp_path_factory.mktemp("heads") / "heads.json"
    path.write_text('{"0": [1, 0], "1": [0.2, 0.8], "2": [0.6, 0.4]}')
    return str(path)
