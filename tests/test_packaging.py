"""The installed package is the checkout: the wheel, the package map, the shared name `kernels`."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import retain

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, SETUPTOOLS = PYPROJECT["project"], PYPROJECT["tool"]["setuptools"]
DATA = {".json", ".md", ".safetensors", ".typed", ".yaml"}
MEASURED = {"findings", "benchmarks"}


def folder_of(package: str) -> Path:
    """Where a package's files lie in the checkout, by the package map (the longest listed prefix decides)."""
    prefix = max((p for p in SETUPTOOLS["package-dir"] if f"{package}.".startswith(f"{p}.")), key=len)
    return ROOT.joinpath(SETUPTOOLS["package-dir"][prefix], *package[len(prefix) :].split("."))


def test_every_package_is_listed() -> None:
    homes = {"retain": "retain", "kernels": "retain.kernels", "train": "retain.train", "eval": "retain.eval"}
    present = {
        ".".join((package, *init.parent.relative_to(ROOT / folder).parts))
        for folder, package in homes.items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    data = {"retain.comparisons", "retain.policies", "retain.recipes"}
    assert set(SETUPTOOLS["packages"]) == present | data


def names_of_wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Files of a wheel built offline, from a copy, since setuptools leaves its build/ in the source."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in ("retain", "kernels", "train", "eval", "configs"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"]
    done = subprocess.run([*command, "-w", str(out), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return set(zipfile.ZipFile(built).namelist())


@pytest.mark.slow
def test_the_wheel_holds_every_file(tmp_path_factory: pytest.TempPathFactory) -> None:
    wheel_names, expected = names_of_wheel(tmp_path_factory), set()
    for package in SETUPTOOLS["packages"]:
        folder = folder_of(package)
        files = [path for path in folder.iterdir() if path.suffix in DATA | {".py"}]
        data_folders = [f for f in folder.iterdir() if f.is_dir() and not (f / "__init__.py").is_file()]
        files += [path for data in data_folders for path in data.rglob("*") if path.suffix in DATA]
        for path in files:
            # What was measured is read in the repository; it is no part of the package.
            if path.name not in {"README.md", "FINDINGS.md"} and path.parent.name not in MEASURED:
                expected.add(f"{package.replace('.', '/')}/{path.relative_to(folder).as_posix()}")
    assert expected - wheel_names == set()
    assert {"retain/py.typed", "retain/kernels/__init__.py", "retain/policies/learned.yaml"} <= wheel_names
    assert {"retain/recipes/laptop.yaml", "retain/recipes/families/mlp.yaml"} <= wheel_names
    assert any(name.startswith("retain/reference/") and name.endswith(".safetensors") for name in wheel_names)
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"retain"}


def python(code: str, cwd: Path, *path: Path) -> str:
    """Return what code prints in a fresh interpreter with `cwd`, then `path`, first on sys.path."""
    prelude = f"import sys; sys.path[0:1] = {[str(cwd), *map(str, path)]!r}\n"
    done = subprocess.run([sys.executable, "-c", prelude + code], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_top_level_kernels_hands_over_to_a_real_one(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text(
        "__version__ = '9.9'\nfrom kernels.inner import VALUE\n"
    )
    (tmp_path / "kernels" / "inner.py").write_text("VALUE = 7\n")
    code = (
        "import kernels, retain.kernels\n"
        "print(kernels.__version__, kernels.VALUE, hasattr(retain.kernels, 'VALUE'))"
    )
    assert python(code, ROOT, tmp_path) == "9.9 7 False"


def test_a_plain_checkout_resolves_its_four_folders(tmp_path: Path) -> None:
    """Without installation (-S hides site-packages), the checkout's root on the path is enough."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import retain.kernels, retain.train, retain.eval\n"
        "print(retain.kernels.__file__, retain.train.__file__, retain.eval.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    expected = [str(ROOT / folder / "__init__.py") for folder in ("kernels", "train", "eval")]
    assert done.stdout.split() == expected


def test_importing_retain_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import retain, retain.kernels, retain.train, retain.eval, retain.config, retain.shapes\n"
        "heavy = {'torch', 'transformers', 'triton', 'accelerate', 'datasets', 'peft', 'matplotlib'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert python(code, tmp_path, ROOT) == "[]"


def test_every_export_resolves() -> None:
    assert sorted(retain.__all__) == sorted(retain._HOMES)
    for name in retain.__all__:
        assert callable(getattr(retain, name)), name
    assert set(retain.__all__) <= set(dir(retain))
    retain.load_policy("learned")
    assert callable(retain.policies), "the data folder retain.policies was imported over the function"


def pins(file: str) -> dict[str, str]:
    """Package -> version, of a file of constraints."""
    lines = (ROOT / file).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_the_lowest_versions_are_the_lower_ends_of_the_ranges() -> None:
    """`make test-lowest` holds a lower end only if it runs there. What only tests need has the usual version,
    and so has torch, of which there is one build for a CPU."""
    (tested,) = re.findall(r"^TESTED := (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    extras = [PROJECT["optional-dependencies"][extra] for extra in tested.split(",") if extra != "dev"]
    required = [Requirement(text) for group in (PROJECT["dependencies"], *extras) for text in group]
    ends = {one.name: spec.version for one in required for spec in one.specifier if spec.operator == ">="}
    assert set(ends) == {one.name for one in required}
    ends.pop("torch")
    lowest, newest = pins("constraints-lowest.txt"), pins("constraints.txt")
    assert lowest == {name: ends.get(name, newest.get(name)) for name in ends | lowest}
    developed = {Requirement(text).name for text in PROJECT["optional-dependencies"]["dev"]}
    assert developed & set(newest) <= set(lowest)
