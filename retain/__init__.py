"""Trains, uses and compares eviction policies for the KV cache of language models.

A newcomer needs three names: `retain.attach(model)` once, `retain.Cache(model, policy=...)` per conversation,
and `retain.policies()` for the list of policies. They are imported on first use: `import retain` loads
neither torch nor transformers and patches nothing.

The stages, in order (`retain.policy` composes them on one screen):

    evidence -> scores, gates -> fusion -> protection -> budget -> selection -> cache -> attend

`retain.hf` connects them to Hugging Face models, `retain.kernels` holds fast ops, `retain.train` and
`retain.eval` are the training and the comparison. In a checkout these three folders lie beside this one; the
end of this file puts them on the package's path.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retain.hf.cache.cache import Cache
    from retain.hf.intercept.attach import attach, detach
    from retain.models.named import load
    from retain.models.named_gates import load_gates, new_gates
    from retain.policy import load_policy, policies

__version__ = "0.1.0"

__all__ = ["Cache", "attach", "detach", "load", "load_gates", "load_policy", "new_gates", "policies"]

_HOMES = {
    "Cache": "retain.hf.cache.cache",
    "attach": "retain.hf.intercept.attach",
    "load": "retain.models.named",
    "detach": "retain.hf.intercept.attach",
    "load_gates": "retain.models.named_gates",
    "load_policy": "retain.policy",
    "new_gates": "retain.models.named_gates",
    "policies": "retain.policy",
}


def __getattr__(name: str) -> Any:
    """Import an exported name from its home when it is first asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'retain' has no attribute {name!r}; it exports {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# A checkout keeps kernels/, train/ and eval/ beside retain/, a wheel keeps them inside. Looking one folder
# further up makes `retain.kernels` and its siblings the same modules in a checkout, installed or not.
_here = Path(__file__).resolve().parent
if not (_here / "kernels").exists() and (_here.parent / "kernels" / "__init__.py").is_file():
    __path__.append(str(_here.parent))
