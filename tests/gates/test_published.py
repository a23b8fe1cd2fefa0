"""Published gates: files of each release's layout, and scores that equal the release's own forward."""

import itertools
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from retain.evidence import Evidence
from retain.gates import GateSet
from retain.gates.artifact import load_gates, save_gates
from retain.gates.published import KINDS, import_published
from tests.close import assert_close
from tests.naive import random_evidence
from tests.refused import refusal

E, H, Q, D, T, F = 12, 2, 8, 4, 9, 10
FINGERPRINT = {"hidden_size": E, "num_heads": Q, "num_kv_heads": H, "head_dim": D, "num_layers": 2}
SIZES = {layer: {"E": E, "H": H, "Q": Q, "D": D} for layer in range(2)}
State = dict[str, Tensor]


ATTENTION = "model.layers.{}.self_attn."
RETENTION = f"{ATTENTION}retention_gate."
KVZAP = {"model_type": "kvzap", "input_dim": E, "output_dim": H, "hidden_dim": F, "n_modules": 2}
DMS = {
    **{"model_type": "qwen3", "rms_norm_eps": 1e-6, "dms_alpha_scale": 10.0},
    **{"dms_initial_alpha_offset": 2.0, "dms_window_size": 512, "dms_cr": 8},
}
# Prefix and shapes of a layer's tensors.
TRIM_1 = {"linear1.weight": (F, E), "linear1.bias": (F,), "bias": (H,)}
QUERIES = {"q_proj.weight": (Q * D, E), "q_norm.weight": (D,)}
SHAPES: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "kvzap_linear": ("layers.{}.", {"weight": (H, E), "bias": (H,)}),
    "kvzap_mlp": ("layers.{}.", {"0.weight": (F, E), "0.bias": (F,), "2.weight": (H, F), "2.bias": (H,)}),
    "fastkvzip": (
        "module.{}.",
        {
            "q_proj.weight": (Q * 3, E),
            "q_proj.bias": (Q * 3,),
            "k_proj.weight": (H * 3, E),
            "q_norm.weight": (3,),
            "k_norm.weight": (3,),
            "k_base": (H, 1, 5, 3),
            "b": (H, 1, Q // H),
        },
    ),
    "trimkv": (RETENTION, {**TRIM_1, "linear2.weight": (H, F)}),
    "dbtrimkv": (
        RETENTION,
        {**TRIM_1, "linear2.weight": (F, F), "linear2.bias": (F,), "linear3.weight": (H, F)},
    ),
    "dms": (ATTENTION, {"dms_proj_alpha_norm.weight": (E,), "dms_proj_alpha.weight": (H, E), **QUERIES}),
    "dms_query": (ATTENTION, {**QUERIES, "k_proj.weight": (H * D, E), "k_norm.weight": (D,)}),
}
# Name -> kind, our family, unit of the score, config, and the sizes of the model that its tensors show.
RELEASES: dict[str, tuple[str, str, str, dict[str, Any], str]] = {
    "kvzap_linear": ("kvzap", "linear", "rank", {**KVZAP, "hidden_dim": None}, "EH"),
    "kvzap_mlp": ("kvzap", "mlp", "rank", KVZAP, "EH"),
    "fastkvzip": ("fastkvzip", "lowrank", "mass", {}, "EHQ"),
    "trimkv": ("trimkv", "decay", "rank", {"retention_gate": "rg", "hidden_act": "silu"}, "EH"),
    "dbtrimkv": ("trimkv", "decay_shared", "rank", {"retention_gate": "rg10"}, "EH"),
    "dms": ("dms", "dms", "rank", {**DMS, "dms_separate_alpha": True, "dms_alpha_per": "head"}, "EH"),
    "dms_query": ("dms_query", "dms", "rank", DMS, "EQD"),
}


def tensors(name: str) -> State:
    """Tensors of two layers; DMS's in the whole model."""
    prefix, shapes = SHAPES[name]
    whole = {"model.embed_tokens.weight": (7, E), "lm_head.weight": (7, E)} if name.startswith("dms") else {}
    state = {part: torch.randn(shape) for part, shape in whole.items()}
    for layer, (part, shape) in itertools.product(range(2), shapes.items()):
        drawn = torch.rand(shape) + 0.5 if "norm" in part else torch.randn(shape)
        state[prefix.format(layer) + part] = drawn
    return state


def save(state: State, folder: Path) -> None:
    save_file(state, folder / "model.safetensors")


def release(name: str, folder: Path, config: object = None) -> State:
    """The release's files (with a config of its own or another), and the tensors in them."""
    state, config = tensors(name), config or RELEASES[name][3]
    folder.mkdir(exist_ok=True)
    save(state, folder)
    if config:
        (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return state


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """A Llama-style RMSNorm."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def published_forward(
    name: str, state: State, layer: int, raw: dict[str, Tensor], eps: float = 1e-6
) -> Tensor:
    """Output of the release's code, `[B, H, T]`, of attention inputs `hidden` and the `stream` before."""
    prefix = SHAPES[name][0].format(layer)
    parts = {
        key.removeprefix(prefix): tensor.double() for key, tensor in state.items() if key.startswith(prefix)
    }

    def affine(x: Tensor, part: str) -> Tensor:
        return functional.linear(x, parts[f"{part}weight"], parts.get(f"{part}bias"))

    raw = {side: tensor.double() for side, tensor in raw.items()}
    x, silu = raw["hidden"], functional.silu
    match name:
        case "kvzap_linear":
            out = affine(x, "")
        case "kvzap_mlp":
            out = affine(functional.gelu(affine(x, "0.")), "2.")
        case "trimkv":
            out = functional.logsigmoid(affine(silu(affine(x, "linear1.")), "linear2.") + parts["bias"])
        case "dbtrimkv":
            inner = silu(affine(silu(affine(x, "linear1.")), "linear2."))
            out = functional.logsigmoid(affine(inner, "linear3.") + parts["bias"])
        case "fastkvzip":
            queries, keys = (affine(x, f"{side}_proj.").view(2, T, H, -1, 3) for side in ("q", "k"))
            queries = rms(queries, parts["q_norm.weight"]).transpose(1, 2).transpose(-1, -2)
            keys = rms(keys, parts["k_norm.weight"]).transpose(1, 2)
            logit = keys @ queries / 3**0.5 + parts["b"].unsqueeze(2)
            logit_base = parts["k_base"] @ queries / 3**0.5
            share = 1 / (1 + torch.exp(logit_base - logit).sum(-2, keepdim=True))
            return share.mean(-1).squeeze(-1)
        case "dms":
            out = (
                affine(rms(raw["stream"], parts["dms_proj_alpha_norm.weight"], eps), "dms_proj_alpha.") * 10
                - 2
            )
        case "dms_query":
            queries = rms(affine(x, "q_proj.").view(2, T, Q, D).transpose(1, 2), parts["q_norm.weight"], eps)
            return queries[:, :: Q // H, :, -1] * 10 - 2
    return out.transpose(1, 2)


def shown(layer: int) -> tuple[Evidence, dict[str, Tensor]]:
    raw = {"hidden": torch.randn(2, T, E), "stream": torch.randn(2, T, E)}
    tensors = {f"{name}_BTE": tensor for name, tensor in raw.items()}
    sizes = {"num_tokens": T, "num_heads": H, "group": Q // H, "head_width": D, "model_width": E}
    return replace(random_evidence((0, 0), **sizes, **tensors), layer_idx=layer), raw


def assert_scores(gates: GateSet, name: str, state: State, eps: float = 1e-6) -> None:
    """Scores are the release's numbers: as they are, their exponential (KVzap), or minus them, each of the
    token after the entry (DMS)."""
    for layer in gates.layers:
        evidence, raw = shown(layer)
        expected = published_forward(name, state, layer, raw, eps=eps)
        found = gates.score(evidence).values_BHT
        if name.startswith("kvzap"):
            found = found.log()  # the release says the logarithm
        elif name in ("trimkv", "dbtrimkv"):
            expected = expected * torch.arange(T - 1, -1, -1)
        elif name.startswith("dms"):
            evicted = functional.pad(expected, (-1, 1), value=0.0) > 0  # nothing decides about the newest
            assert evicted.any() and torch.equal(found < 0, evicted) and (found[..., -1] > 100).all()
            found, expected = found[..., :-1], -expected[..., 1:]
        assert_close(found, expected.float())


@pytest.mark.parametrize("name", sorted(RELEASES))
def test_scores_are_those_of_the_release(name: str, tmp_path: Path) -> None:
    """Imported by name or not, from half precision too, and as an artifact."""
    kind, family, unit = RELEASES[name][:3]
    assert {kind for kind, *_ in RELEASES.values()} == set(KINDS)
    state = release(name, tmp_path / "release")
    for named in (kind, "auto"):
        gates = import_published(tmp_path / "release", SIZES, kind=named)
        assert gates.family == family and gates.unit == unit and gates.layers == (0, 1)
        assert gates.metadata["published"]["kind"] == kind
        assert_scores(gates, name, state)
    save_gates(gates, tmp_path / "gates", fingerprint=FINGERPRINT)
    back = load_gates(tmp_path / "gates", fingerprint=FINGERPRINT)
    assert back.unit == gates.unit and back.metadata["published"] == gates.metadata["published"]
    assert_scores(back, name, state)
    half = {key: tensor.bfloat16() for key, tensor in state.items()}
    save_file(half, tmp_path / "release" / "model.safetensors")
    gates = import_published(tmp_path / "release", SIZES)
    assert all(parameter.dtype == torch.float32 for parameter in gates.parameters())
    assert_scores(gates, name, half)


def test_tensors_lie_in_one_file_or_in_several_and_layers_that_stay_alone_are_left_out(
    tmp_path: Path,
) -> None:
    state = release("dms", tmp_path)
    assert_scores(import_published(tmp_path / "model.safetensors", SIZES), "dms", state)
    (tmp_path / "model.safetensors").unlink()
    for number in range(3):
        some = {key: state[key] for key in sorted(state)[number::3]}
        save_file(some, tmp_path / f"model-0000{number + 1}-of-00003.safetensors")
    assert_scores(import_published(tmp_path, SIZES), "dms", state)
    save_file(
        {"model.layers.0.self_attn.dms_proj_alpha.weight": torch.zeros(H, E)}, tmp_path / "z.safetensors"
    )
    with refusal("both hold 'model.layers.0.self_attn.dms_proj_alpha.weight'"):
        import_published(tmp_path, SIZES)
    state = release("fastkvzip", tmp_path / "other")
    gates = import_published(tmp_path / "other", {1: SIZES[1]})
    assert gates.layers == (1,)
    assert_scores(gates, "fastkvzip", state)


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("kvzap_mlp", "layers.", "module_list."),  # before the release was renamed
        ("fastkvzip", "module.", ""),  # the list of gates alone
        ("dbtrimkv", "model.layers.", "model.language_model.layers."),  # of a multimodal model
    ],
)
def test_other_names_of_the_layers_are_read(name: str, ours: str, theirs: str, tmp_path: Path) -> None:
    state = release(name, tmp_path)
    save({key.replace(ours, theirs, 1): tensor for key, tensor in state.items()}, tmp_path)
    assert_scores(import_published(tmp_path, SIZES), name, state)


@pytest.mark.parametrize("name", ["dbtrimkv", "fastkvzip", "trimkv"])
def test_a_pickled_release_is_read(name: str, tmp_path: Path) -> None:
    state = tensors(name)
    layers = [
        {key.split(".", 2)[2]: tensor for key, tensor in state.items() if key.startswith(f"module.{layer}.")}
        for layer in range(2)
    ]
    loss = torch.tensor([[0.5, 0.25]], dtype=torch.float64).numpy()
    whole = {"module": layers, "loss": loss, "acc_train": loss, "steps": 50}
    torch.save(whole if name == "fastkvzip" else state, tmp_path / "weights.pt")
    for path in (tmp_path, tmp_path / "weights.pt"):
        assert_scores(import_published(path, SIZES), name, state)


class Program:
    """A program in a pickle."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return print, ("ran",)


def test_a_pickle_that_runs_code_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"module": [Program()]}, tmp_path / "bad.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "bad.pt").read_bytes()[:50])
    for name in ("bad", "cut"):
        with refusal(f"{name}.pt is corrupt, or more than tensors"):
            import_published(tmp_path / f"{name}.pt", SIZES)
    assert "ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "part", "extra"),
    [
        ("kvzap_mlp", "2.bias", "4.bias"),
        ("fastkvzip", "k_base", "extra"),
        ("trimkv", "bias", "linear9.weight"),
        ("dms", "dms_proj_alpha_norm.weight", "dms_proj_alpha_norm.extra"),
        ("dms_query", "q_norm.weight", "q_norm.extra"),
    ],
)
def test_a_tensor_that_is_missing_or_too_many_is_named(
    name: str, part: str, extra: str, tmp_path: Path
) -> None:
    state, prefix = release(name, tmp_path), SHAPES[name][0]
    save({key: each for key, each in state.items() if key != prefix.format(1) + part}, tmp_path)
    with refusal("is not of this model, or incomplete|does not hold the tensors of these gates"):
        import_published(tmp_path, SIZES, kind=RELEASES[name][0])
    save({**state, prefix.format(1) + extra: torch.zeros(3)}, tmp_path)
    with refusal(f"'{extra}' of layer 1 is no part of {RELEASES[name][0]} gates"):
        import_published(tmp_path, SIZES)


@pytest.mark.parametrize("name", sorted(RELEASES))
@pytest.mark.parametrize("size", ["E", "H", "Q", "D"])
def test_gates_of_another_width_are_refused(name: str, size: str, tmp_path: Path) -> None:
    release(name, tmp_path)
    other = {layer: {**sizes, size: 2 * sizes[size]} for layer, sizes in SIZES.items()}
    fits = size not in RELEASES[name][4]
    with nullcontext() if fits else refusal("or incomplete|does not hold the tensors of these gates"):
        assert import_published(tmp_path, other).family == RELEASES[name][1]


def test_what_is_no_published_gate_is_refused(tmp_path: Path) -> None:
    with refusal("there are no published gates at"):
        import_published(tmp_path, SIZES)
    release("kvzap_linear", tmp_path)
    for sizes in ({**SIZES, 2: SIZES[0]}, {0: SIZES[0]}):
        with refusal(r"has kvzap gates for layers \[0, 1\], and the model's layers are \[0"):
            import_published(tmp_path, sizes)
    release("dms", tmp_path)
    with refusal(r"it has kvzap gates for layers \[\], and"):
        import_published(tmp_path, SIZES, kind="kvzap")
    with refusal("unknown kind of published gates 'kvzapp': did you mean 'kvzap'"):
        import_published(tmp_path, SIZES, kind="kvzapp")
    save({"model.norm.weight": torch.ones(3)}, tmp_path)
    with refusal("no gates of a kind that is known .its tensors: model.norm.weight"):
        import_published(tmp_path, SIZES)
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    with refusal("corrupt, or more than tensors .*fetch it again"):
        import_published(tmp_path, SIZES)
    state = tensors("trimkv")
    next(iter(state.values()))[0] = float("nan")
    save(state, tmp_path)
    with refusal("holds numbers that are not finite"):
        import_published(tmp_path, SIZES)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"retention_gate": "rg3"}, "variant 'rg3' are not read here, only `rg`"),
        ({"hidden_act": "gleu"}, r"config\.json, .* decay.activation: .*'gleu'.*did you mean 'gelu'"),
        ("{", "config.json is not readable JSON"),
        # Read at the top alone, it would be SiLU in a multimodal release, and no shape would tell.
        ({"text_config": {"hidden_act": "relu"}, "hidden_act": "gelu"}, "relu"),
        ({"text_config": {"hidden_activation": "gelu"}}, "gelu"),
        ({"hidden_act": None}, "silu"),
    ],
)
def test_the_config_says_the_variant_and_the_activation(config: Any, wanted: str, tmp_path: Path) -> None:
    release("trimkv", tmp_path, config)
    if " " in wanted:
        with refusal(wanted):
            import_published(tmp_path, SIZES)
    else:
        gates = import_published(tmp_path, SIZES)
        assert gates[0].dims()["activation"] == gates[1].dims()["activation"] == wanted


@pytest.mark.parametrize("name", ["dms", "dms_query"])
def test_the_config_of_dms_says_scale_offset_and_eps(name: str, tmp_path: Path) -> None:
    """Those that it does not state are the defaults of its config class; a bias comes with the model's."""
    path = tmp_path / "model.safetensors"
    state = tensors(name)
    save_file(state, path)
    dims = import_published(path, SIZES, kind=name)[0].dims()
    assert (dims["scale"], dims["offset"], dims["eps"], dims["bias"]) == (100.0, 5.0, 1e-6, False)
    assert dims["decides"] == "next" and dims["query_width"] == (D if name == "dms_query" else 0)
    bias = "q_proj.bias" if name == "dms_query" else "dms_proj_alpha.bias"
    for layer in range(2):
        state[ATTENTION.format(layer) + bias] = torch.randn(Q * D if name == "dms_query" else H)
    save_file(state, path)
    (tmp_path / "config.json").write_text(json.dumps({**DMS, "rms_norm_eps": 0.1}))
    assert_scores(import_published(path, SIZES), name, state, eps=0.1)
    (tmp_path / "config.json").write_text(json.dumps({**DMS, "dms_alpha_per": "layer"}))
    with refusal("one decision per layer .dms_alpha_per. are not read here"):
        import_published(path, SIZES, kind=name)
