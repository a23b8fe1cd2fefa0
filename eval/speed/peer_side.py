"""Answers for the field's main library (kvpress), run by the interpreter of *its* environment.

    PEER_PYTHON eval/speed/peer_side.py FOLDER

The folder was written by `retain.eval.speed.peers` (a model, token ids, how to run). Each line of the
standard input is a JSON request, each line of the standard output its JSON answer; tensors are safetensors
files in the folder. This file knows nothing of `retain` (its environment has other pins) and nothing of the
library's insides: what a press keeps is read off the keys and values that its own `compress` gives back, or
off the entries that it says it masks; what it costs, off the clock and the cache's tensors.

    {"do": "versions"}                                      -> versions of what runs here
    {"do": "kept", "press": PRESS, "ratio": r, "tokens": n} -> a file: kept masks and scores, layer by layer
    {"do": "life", "press": PRESS or null, "kept": n, ...}  -> time and bytes of one prompt and answer

PRESS is `{"name": class, "settings": {...}, "inner": PRESS or null, "attentions": whether it wants them}`.
"""

import contextlib
import gc
import importlib
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache, GenerationMixin

LIBRARY = "kvpress"
# What transformers calls a cache: renamed in 5.24. This side runs where `retain` is not.
_NAMES = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = "cache" if "cache" in _NAMES else "past_key_values"


class Here:
    """The model and the tokens of a folder, and what can be asked about them.

    Args:
        folder: with `model/`, `ids.safetensors` and `request.json`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.how = json.loads((folder / "request.json").read_text(encoding="utf-8"))
        torch.set_num_threads(self.how["threads"])
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder / "model", dtype=getattr(torch, self.how["dtype"]), attn_implementation="sdpa"
        )
        self.model = model.to(self.how["device"]).eval().requires_grad_(False)
        self.ids_BT = load_file(folder / "ids.safetensors")["ids"].to(self.how["device"])
        self.answers = 0
        for layer in self.model.model.layers:
            layer.self_attn.register_forward_pre_hook(positions_of_cache, with_kwargs=True)

    def press(self, asked: dict[str, Any]) -> Any:
        """A press by name; the library is imported with the first, since that changes transformers."""
        library = importlib.import_module(LIBRARY)
        settings = {**asked["settings"]}
        if asked.get("inner"):
            settings["press"] = self.press(asked["inner"])
        return getattr(library, asked["name"])(**settings)

    def versions(self, _: dict[str, Any]) -> dict[str, Any]:
        """Versions of what runs here; the library's is null where it is not installed."""
        found: dict[str, Any] = {"python": sys.version.split()[0]}
        for name in ("torch", "transformers", LIBRARY):
            found[name] = None
            with contextlib.suppress(metadata.PackageNotFoundError):
                found[name] = metadata.version(name)
        return found

    def kept(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Masks of what a press keeps of each prompt, read alone: some presses take a batch of one for
        granted."""
        prompts_BT = self.ids_BT[:, : asked["tokens"]]
        press = self.press(asked["press"])
        press.compression_ratio = asked["ratio"]
        self.model.set_attn_implementation("eager" if asked["press"]["attentions"] else "sdpa")
        rows: list[list[dict[str, torch.Tensor]]] = []
        for ids_T in prompts_BT:
            with watching(press) as layers, press(self.model):
                self.model.model(input_ids=ids_T[None], use_cache=True, **{CACHE: DynamicCache()})
            rows.append(layers)
        answer = {
            f"{name}.{layer}": torch.cat([row[layer][name] for row in rows])
            for layer in range(len(rows[0]))
            for name in rows[0][layer]
        }
        self.answers += 1
        path = self.folder / f"answer-{self.answers}.safetensors"
        save_file({name: tensor.contiguous().cpu() for name, tensor in answer.items()}, path)
        return {"file": path.name, "layers": len(rows[0])}

    def life(self, asked: dict[str, Any]) -> dict[str, Any]:
        """One prompt and what is decoded behind it, timed; with `watch`, the resident set's peak instead of
        the allocator's."""
        tokens, batch = self.how["tokens"], asked["batch"]
        prompt, following = self.ids_BT[:batch, :tokens], self.ids_BT[:batch, tokens:]
        pressed: Any = contextlib.nullcontext
        if asked["press"] is not None:
            pressed = self.press(asked["press"])
            pressed.compression_ratio = self.ratio(asked["kept"])
        for layer in self.model.model.layers:
            layer.self_attn.masked_key_indices = None
        gc.collect()
        peak = self.peak(asked.get("watch", False))
        cache: Any = DynamicCache()
        start = self.now()
        with pressed(self.model):
            self.step(prompt, None, cache)
            first = self.now()
            prefill_peak, held = peak(), self.held(cache)
            again = self.now()
            for step in range(following.shape[1]):
                self.step(following[:, step : step + 1], tokens + step, cache)
            end = self.now()
        times = {
            "ttft_ms": 1e3 * (first - start),
            "token_ms": 1e3 * (end - again) / max(1, following.shape[1]),
        }
        return {**times, "prefill_peak": prefill_peak, "decode_peak": peak(), **held}

    def ratio(self, kept: int) -> float:
        """The library's ratio at which a prompt keeps so many entries, and half a one: it rounds down."""
        return 1 - (kept + 0.5) / self.how["tokens"]

    def step(self, ids_BS: torch.Tensor, position: "int | None", cache: Any) -> None:
        """Reads tokens and chooses the next one; of one behind the prompt the position is said, since the
        cache counts what it holds, not what it has seen."""
        more = {} if position is None else {"position_ids": torch.full_like(ids_BS, position)}
        given = {"input_ids": ids_BS, CACHE: cache, "use_cache": True, "logits_to_keep": 1}
        self.model(**given, **more).logits[:, -1].argmax(-1)

    def held(self, cache: Any) -> dict[str, int]:
        """Bytes of keys and values in the cache, of the storage behind them (once, if they share it), and of
        the lists of entries that are to be overwritten."""
        lists = [getattr(layer.self_attn, "masked_key_indices", None) for layer in self.model.model.layers]
        masked = [index for own in lists for index in own or ()]
        cached = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        storages = {one.data_ptr(): one.nbytes() for one in (tensor.untyped_storage() for tensor in cached)}
        return {
            "bytes_held": sum(tensor.nbytes for tensor in cached),
            "bytes_allocated": sum(storages.values()),
            "bytes_beside": sum(index.nbytes for index in masked),
            "entries_masked": sum(len(index) for index in masked[::3]),
        }

    def now(self) -> float:
        """Seconds, once the device is done."""
        if self.how["device"].startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter()

    def peak(self, resident: bool) -> "Callable[[], int | None]":
        """Starts watching memory: a function that says the peak beyond now, and starts anew."""
        status = Path("/proc/self/status")

        def line(name: str) -> int:
            return 1024 * int(status.read_text().split(f"{name}:")[1].split()[0])

        if self.how["device"].startswith("cuda"):
            forget: Callable[[], Any] = torch.cuda.reset_peak_memory_stats
            most, held = torch.cuda.max_memory_allocated, torch.cuda.memory_allocated
        elif resident:
            forget = partial(Path("/proc/self/clear_refs").write_text, "5")
            most, held = partial(line, "VmHWM"), partial(line, "VmRSS")
        else:
            return lambda: None
        before = held()
        forget()

        def beyond() -> int:
            found = most() - before
            forget()
            return found

        return beyond


def positions_of_cache(module: Any, args: Any, kwargs: dict[str, Any]) -> "tuple[Any, dict[str, Any]] | None":
    """Gives an attention module the `cache_position` that its hooks read, where transformers (from 5.3 on) no
    longer does."""
    if kwargs.get("cache_position") is not None or kwargs.get(CACHE) is None:
        return None
    past, new = kwargs[CACHE].get_seq_length(module.layer_idx), kwargs["hidden_states"].shape[1]
    device = kwargs["hidden_states"].device
    return args, {**kwargs, "cache_position": torch.arange(past, past + new, device=device)}


@contextlib.contextmanager
def watching(press: Any) -> "Iterator[list[dict[str, torch.Tensor]]]":
    """Notes what a press keeps, layer by layer: `kept` bool `[B, H, T]`, and its `score`s where it has some
    (`first`: of the press that it wraps)."""
    layers: list[dict[str, torch.Tensor]] = []
    scores: dict[str, torch.Tensor] = {}
    compress = press.compress

    def noted(name: str, score: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            found = score(*args, **kwargs)
            scores[name] = found.detach().float().clone()
            return found

        return wrapper

    def wrapper(module: Any, hidden: Any, keys: Any, values: Any, *rest: Any) -> Any:
        scores.clear()
        module.masked_key_indices = None
        kept = compress(module, hidden, keys, values, *rest)
        if module.masked_key_indices is not None:
            mask = torch.ones(keys.shape[:3], dtype=torch.bool, device=keys.device)
            mask[tuple(index.to(keys.device) for index in module.masked_key_indices)] = False
        else:
            mask = found_again(keys, values, *kept)
        layers.append({"kept": mask, **scores})
        return kept

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(press, "compress", wrapper))
        inner: Any = getattr(press, "press", None)
        for one, name in ((press, "score"), (inner, "first")):
            if hasattr(one, "score"):
                stack.enter_context(patch.object(one, "score", noted(name, one.score)))
        yield layers


def found_again(
    keys: torch.Tensor, values: torch.Tensor, kept_keys: torch.Tensor, kept_values: torch.Tensor
) -> torch.Tensor:
    """Which entries were kept, in whatever order: bool `[B, H, T]`.

    Raises:
        ValueError: a kept entry is none of the old ones, or is several of them.
    """
    same = (kept_keys[:, :, :, None] == keys[:, :, None]).all(-1)
    same &= (kept_values[:, :, :, None] == values[:, :, None]).all(-1)
    if not bool((same.sum(-1) == 1).all()):
        raise ValueError("a kept entry is not exactly one of those that there were: it cannot be named")
    return same.any(2)


def main() -> int:
    """Answers requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    here = Here(Path(sys.argv[1]))
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            with torch.no_grad():
                answer = {"versions": here.versions, "kept": here.kept, "life": here.life}[asked["do"]](asked)
        except Exception as error:  # whatever it is, the side that asked has to hear of it
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
