"""A model and its tokenizer by name: `reference:<seed>`, a local folder, or a hub name.

In: a name and how to load it. Out: a causal language model as transformers loads it, and its tokenizer. The
one decision taken here: whatever cannot be loaded ends in one `ValueError` that names the model and says
what could be passed instead; a missing tokenizer is none of that, since token ids need none.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

__all__ = ["REFERENCE", "load_named", "load_named_tokenizer", "reference_seed"]

# What the names of the models that ship with this package begin with.
REFERENCE = "reference:"


def reference_seed(name: str) -> int | None:
    """Seed of a reference model; None for the name of any other model.

    Raises:
        ValueError: if no number follows `reference:`.
    """
    if not name.startswith(REFERENCE):
        return None
    seed = name.removeprefix(REFERENCE)
    if not seed.isdigit():
        raise ValueError(f"model={name!r}: wanted `reference:<seed>`, for instance reference:0.")
    return int(seed)


def load_named(
    name: str,
    *,
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    device_map: str | Mapping[str, Any] | None = None,
    quantization: Mapping[str, Any] | None = None,
    loading: AbstractContextManager[Any] | None = None,
) -> tuple[Any, Any]:
    """Load a causal language model, in eval mode, and its tokenizer.

    Args:
        name: `reference:<seed>`, a local folder, or a hub name.
        dtype: of its weights, as torch calls it; `auto`: as the checkpoint says.
        revision: of a hub model.
        trust_remote_code: run code that comes with the checkpoint.
        device_map: as transformers takes it; None: the CPU.
        quantization: transformers' quantisation config as a mapping; None: as the checkpoint is.
        loading: entered while weights are read.

    Returns:
        The model, and its tokenizer; None if it has none.

    Raises:
        ValueError: the name cannot be resolved, or the model cannot be loaded like this; says why.
    """
    seed = reference_seed(name)
    if seed is not None:
        if device_map is not None or quantization is not None:
            raise ValueError(
                f"model={name!r} is a small model made on the spot, which is neither quantised nor spread "
                "over devices: leave out device_map and quantization."
            )
        from retain.reference import load_model, load_tokenizer

        model = load_model(seed=seed)
        return model if dtype == "auto" else model.to(getattr(torch, dtype)), load_tokenizer()
    from transformers import AutoModelForCausalLM

    origin = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    how: dict[str, Any] = {"dtype": dtype if dtype == "auto" else getattr(torch, dtype)}
    if device_map is not None:
        how["device_map"] = device_map if isinstance(device_map, str) else {**device_map}
    if quantization is not None:
        how["quantization_config"] = {**quantization}
    try:
        with loading or nullcontext():
            model = AutoModelForCausalLM.from_pretrained(name, **how, **origin)
    except (OSError, ValueError, ImportError) as error:
        asked = "" if quantization is None else f" with quantization={how['quantization_config']}"
        raise ValueError(
            f"model={name!r} cannot be loaded{asked}: {error} Pass a local folder, a hub name, or "
            "reference:0."
        ) from error
    return model.eval(), load_named_tokenizer(name, revision=revision, trust_remote_code=trust_remote_code)


def load_named_tokenizer(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer alone; None if the model has none.

    Raises:
        ValueError: whether it has one cannot be known, since the hub is out of reach.
    """
    if reference_seed(name) is not None:
        from retain.reference import load_tokenizer

        return load_tokenizer()
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            name, revision=revision or "main", trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        if not Path(name).is_dir() and _out_of_reach(error):
            raise ValueError(
                f"model={name!r}: whether it has a tokenizer cannot be known: {error} Connect, or pass a "
                "local folder."
            ) from error
        return None


def _out_of_reach(error: BaseException) -> bool:
    """Whether the hub could not be asked, which says nothing of what it holds."""
    from httpx import TransportError
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, LocalEntryNotFoundError | ConnectionError | TimeoutError | TransportError):
            return True
        if isinstance(cause, HfHubHTTPError) and not isinstance(cause, EntryNotFoundError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
