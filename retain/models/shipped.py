"""Gates that ship with this package, found by the weights of the model, and what there is for other models.

A folder of `retain/models/gates` is an artifact of gates as `train/distill.py` writes it, its matrices in 16
bits; its name is that of a model of the catalogue. `make gates-smollm2` trains it.
"""

from functools import cache
from pathlib import Path

from retain.gates.artifact import METADATA_FILE, read_metadata

FOLDER = Path(__file__).parent / "gates"

# Gates that others have published: the model -> repositories of the hub. None could be had here to be tried.
PUBLISHED: dict[str, tuple[str, ...]] = {
    "Qwen/Qwen3-8B": (
        *("nvidia/KVzap-mlp-Qwen3-8B", "nvidia/KVzap-linear-Qwen3-8B"),
        *("Jang-Hyun/Fast-KVzip", "ngocbh/TrimKV-Qwen3-8B-Math"),
    ),
    "Qwen/Qwen3-32B": ("nvidia/KVzap-mlp-Qwen3-32B", "nvidia/KVzap-linear-Qwen3-32B"),
    "meta-llama/Llama-3.1-8B-Instruct": (
        *("nvidia/KVzap-mlp-Llama-3.1-8B-Instruct", "nvidia/KVzap-linear-Llama-3.1-8B-Instruct"),
    ),
    "Qwen/Qwen2.5-7B-Instruct-1M": ("Jang-Hyun/Fast-KVzip",),
    "Qwen/Qwen3-1.7B": ("ngocbh/TrimKV-Qwen3-1.7B-Math",),
    "Qwen/Qwen3-4B": ("ngocbh/TrimKV-Qwen3-4B-Math", "ngocbh/DBTrimKV-Qwen3-4B-Math"),
    "Qwen/Qwen3-14B": ("ngocbh/TrimKV-Qwen3-14B-Math",),
    "Qwen/Qwen3-4B-Instruct-2507": (
        *("ngocbh/TrimKV-Qwen3-4B-Instruct-2507", "ngocbh/DBTrimKV-Qwen3-4B-Instruct-2507"),
    ),
    "microsoft/Phi-3-mini-128k-instruct": ("ngocbh/TrimKV-Phi-3-mini-128k-instruct",),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": ("ngocbh/TrimKV-DeepSeek-R1-Distill-Llama-8B",),
}


def shipped() -> tuple[str, ...]:
    """Names of the models that gates ship for."""
    return tuple(name for name, _ in records())


def match_of(fingerprint: dict[str, str | int]) -> tuple[str, bool] | None:
    """Name of the gates that ship for a model of this fingerprint, and whether the weights are those that
    they were trained on, or others of the same sizes; None: there are none of these sizes.

    Args:
        fingerprint: `retain.hf.model.identity.fingerprint` of the model.
    """
    alike = None
    for name, known in records():
        if known == fingerprint:
            return name, True
        if {**known, "sha256": ""} == {**fingerprint, "sha256": ""}:
            alike = name, False
    return alike


def published_for(name: str) -> tuple[str, ...]:
    """Repositories of gates that others have published for a model of the hub."""
    return {known.lower(): repositories for known, repositories in PUBLISHED.items()}.get(name.lower(), ())


@cache
def records() -> tuple[tuple[str, dict[str, str | int]], ...]:
    """Names of the models that gates ship for, each with the fingerprint of its weights."""
    folders = sorted(path.parent for path in FOLDER.glob(f"*/{METADATA_FILE}"))
    return tuple((folder.name, read_metadata(folder)["fingerprint"]) for folder in folders)
