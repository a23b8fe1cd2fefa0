"""Whatever a config holds, it is built and checked, or refused by a ValueError that names key or file.

Keys and values of every kind are drawn, written as YAML or typed as overrides. Work and memory are bounded by
what was given: the limits here are against loops and tables without end alone.
"""

import resource
import signal
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
import yaml
from accelerate import Accelerator
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retain.config import load
from retain.eval.config import CompareConfig, all_lines, find_policy
from retain.eval.run import checks
from retain.hf.model.unloaded import meta_model
from retain.presets import Policy, load_policy
from retain.train import distill
from retain.train.recipe import DistillConfig, check
from tests.eval.stub import STUB

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 30
SHIPPED = {
    DistillConfig: sorted((ROOT / "configs/distill").rglob("*.yaml")),
    CompareConfig: sorted((ROOT / "configs/compare").glob("*.yaml")),
    Policy: sorted((ROOT / "configs/policy").glob("*.yaml")),
}
# Names that settings of somebody else have: of gates, of scores, of a generator of tasks.
INNER = ("F", "heads", "width", "rank", "window", "pool_size", "page_size", "future", "num_tokens", "x")

numbers = st.one_of(
    st.sampled_from([0, 1, -1, 2, 3, 7, 64, 2**16, 2**24, 2**31, 2**63, -(2**63), 10**12, 10**30]),
    st.sampled_from([0.0, -0.0, 0.5, 1.0, 1.5, 1e-30, 5e-324, 1e30, 1e308, float("nan"), float("inf")]),
    st.integers(),
    st.floats(),
)
# What would fill a screen in hypothesis' own messages, by name.
LARGE = {"LONG TEXT": "a" * 3000, "LONG LIST": [1] * 3000, "LARGE INT": 10**400}
words = st.one_of(
    st.sampled_from(["", "x", "nan", "1e3", "mlp", "gate", "snapkv", "recency", "{seed}", "\0", "ü/..", "~"]),
    st.sampled_from(["own", "appendix", "mse", "kl_forward", "protection.sinks=-1", "scope=layer", "[", "*"]),
    st.sampled_from([*LARGE]),
    st.text(max_size=8),
)
scalars = st.one_of(numbers, words, st.booleans(), st.none())
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.sampled_from(INNER), words), inner, max_size=3),
    ),
    max_leaves=4,
)


def leaves(hint: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of a config, sections too."""
    origin = get_origin(hint)
    if path:
        yield path
    if origin is Annotated:
        hint = get_args(hint)[0]
    for one in get_args(hint) if origin in (Union, types.UnionType) else (hint,):
        if isinstance(one, type) and is_dataclass(one):
            hints = get_type_hints(one, include_extras=True)
            for field in fields(one):
                yield from leaves(hints[field.name], (*path, field.name))
        elif one is dict or get_origin(one) is dict:
            yield from ((*path, name) for name in INNER)


KEYS = {cls: sorted(set(leaves(cls))) for cls in SHIPPED}


@contextmanager
def bounded(seconds: int, num_bytes: int) -> Iterator[None]:
    """Inside, loops and allocations without end become errors that no test takes for an answer."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"took longer than {seconds} s")

    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    memory = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    resource.setrlimit(resource.RLIMIT_AS, (held + num_bytes, memory[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, memory)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@st.composite
def configs(draw: st.DrawFn) -> tuple[type, dict[str, Any], list[str], list[str]]:
    """A kind of config, one that is shipped with some keys changed, overrides, and the keys' names."""
    cls = draw(st.sampled_from(list(SHIPPED)))
    mapping = yaml.safe_load(draw(st.sampled_from(SHIPPED[cls])).read_text())
    keys = draw(st.lists(st.one_of(st.sampled_from(KEYS[cls]), st.tuples(words)), min_size=1, max_size=3))
    overrides = []
    for key in keys:
        value = draw(values)
        value = LARGE.get(value, value) if isinstance(value, str) else value
        if draw(st.booleans()) and all(key):
            overrides.append(f"{'.'.join(key)}={yaml.safe_dump(value).removesuffix('...' + chr(10)).strip()}")
            continue
        section = mapping
        for name in key[:-1]:
            if not isinstance(section.get(name), dict):
                section[name] = {}
            section = section[name]
        section[key[-1]] = value
    return cls, mapping, overrides, [key[-1] for key in keys]


def ask(cls: type, path: Path, overrides: list[str]) -> None:
    """Do with a config all that is done before anything is loaded."""
    config: Any = load(path, cls, overrides)
    if cls is DistillConfig:
        check(config, 1)
        if config.plan.memory_gib is not None or config.plan.tflops is not None:  # else a rate is measured
            distill.plan_run(config, Accelerator(cpu=True)).text()
    elif cls is CompareConfig:
        if problems := checks.stated_problems(config, STUB):
            raise ValueError(f"{path}: {'; '.join(problems)}")
        for line in all_lines(config):
            find_policy(config, line.policy, line.protection)


@pytest.fixture(scope="module")
def small() -> Iterator[None]:
    """Whatever a config names, the plan is that of the reference model, which is made once."""
    model = meta_model("reference:0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill, "meta_model", lambda *_, **__: model)
        patch.setattr(distill, "_dtype", lambda *_: "float32")
        yield


@pytest.mark.usefixtures("small")
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=configs())
def test_any_config_is_built_or_refused_by_name(tmp_path_factory: pytest.TempPathFactory, drawn: Any) -> None:
    cls, mapping, overrides, names = drawn
    path = tmp_path_factory.getbasetemp() / "drawn.yaml"
    path.write_text(yaml.safe_dump(mapping), encoding="utf-8")
    with bounded(SECONDS, 2**30):
        try:
            ask(cls, path, overrides)
        except ValueError as error:
            said = str(error)
            # Where two keys contradict each other, it may be the other one that is named.
            known = {*names, *(name for key in KEYS[cls] for name in key if name not in INNER)}
            assert path.name in said or any(name and name[:50] in said for name in known), said
            assert len(said) < 100_000


@settings(max_examples=40, deadline=None)
@given(text=st.one_of(st.text(max_size=60), st.binary(max_size=40)), kind=st.sampled_from(list(SHIPPED)))
def test_any_text_is_a_config_or_an_error_that_names_the_file(
    tmp_path_factory: pytest.TempPathFactory, text: str | bytes, kind: type
) -> None:
    path = tmp_path_factory.getbasetemp() / "text.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    with bounded(SECONDS, 2**30), pytest.raises(ValueError, match="text.yaml"):
        load(path, kind)
    if isinstance(text, str):
        with bounded(SECONDS, 2**30):
            try:
                load_policy("snapkv", [text])
            except ValueError as error:
                assert "override" in str(error) or "snapkv" in str(error)
