"""Published gates: files of each release's layout, and scores that equal the release's own forward."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from retain.attention.rotary import Rotary
from retain.evidence import Evidence
from retain.gates import GateSet
from retain.gates.artifact import load_gates, save_gates
from retain.gates.published import KINDS, import_published
from retain.gates.unpickle import unpickle
from tests.close import assert_close
from tests.refused import refusal

E, H, Q, D, T, F = 12, 2, 8, 4, 9, 10
FINGERPRINT = {"hidden_size": E, "num_heads": Q, "num_kv_heads": H, "head_dim": D, "num_layers": 2}
SIZES = {layer: {"E": E, "H": H, "Q": Q, "D": D} for layer in range(2)}
ROTARY = Rotary(torch.tensor([1.0, 0.1]))
State = dict[str, Tensor]


ATTENTION = "model.layers.{}.self_attn."
RETENTION = f"{ATTENTION}retention_gate."
KVZAP = {"model_type": "kvzap", "input_dim": E, "output_dim": H, "hidden_dim": F, "n_modules": 2}
DMS = {
    **{"model_type": "qwen3", "rms_norm_eps": 1e-6, "dms_alpha_scale": 10.0},
    **{"dms_initial_alpha_offset": 2.0, "dms_window_size": 512, "dms_cr": 8},
}
WIDE = (2 * H + Q) * D
INNER = 6  # of WG-KV: 1.5 head widths, as released for Qwen3
# Prefix and shapes of a layer's tensors.
TRIM_1 = {"linear1.weight": (F, E), "linear1.bias": (F,), "bias": (H,)}
QUERIES = {"q_proj.weight": (Q * D, E), "q_norm.weight": (D,)}
LOCRET = {"fc1.weight": (F, WIDE), "fc2.weight": (H, F)}
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
    "locret": (ATTENTION, {**LOCRET, "q_proj.weight": (Q * D, E)}),
    "locret_phi3": (ATTENTION, {**LOCRET, "qkv_proj.weight": (WIDE, E)}),
    "wgkv": (
        f"{ATTENTION}g_predictors.",
        {
            "pre_key_norm.weight": (D,),
            "post_key_norm.weight": (D,),
            "conv1.weight": (H * INNER, 2 * D, 1),
            "conv1.bias": (H * INNER,),
            "conv2.weight": (H, INNER, 1),
            "conv2.bias": (H,),
        },
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
    "locret": ("locret", "qkv", "mass", {"model_type": "llama", "hidden_act": "silu"}, "HQD"),
    "locret_phi3": ("locret", "qkv", "mass", {"model_type": "phi3"}, "HQD"),
    "wgkv": ("wgkv", "admission", "rank", {}, "HD"),
    "dms": ("dms", "dms", "rank", {**DMS, "dms_separate_alpha": True, "dms_alpha_per": "head"}, "EH"),
    "dms_query": ("dms_query", "dms", "rank", DMS, "EQD"),
}


def tensors(name: str) -> State:
    """Of two layers; Locret's and DMS's in the whole model."""
    prefix, shapes = SHAPES[name]
    in_model = name.startswith(("locret", "dms"))
    whole = {"model.embed_tokens.weight": (7, E), "lm_head.weight": (7, E)} if in_model else {}
    state = {part: torch.randn(shape) for part, shape in whole.items()}
    for layer, (part, shape) in itertools.product(range(2), shapes.items()):
        drawn = torch.rand(shape) + 0.5 if "norm" in part else torch.randn(shape)
        state[prefix.format(layer) + part] = drawn * 2 if part == "conv2.weight" else drawn
    return state


def save(state: State, folder: Path) -> None:
    save_file(state, folder / "model.safetensors")


def release(name: str, folder: Path, config: object = None) -> State:
    """The release's files (with a config of its own or another), and the tensors in them."""
    state, own = tensors(name), config or RELEASES[name][3]
    folder.mkdir(exist_ok=True)
    save(state, folder)
    if own:
        (folder / "config.json").write_text(own if isinstance(own, str) else json.dumps(own))
    return state


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """A Llama-style RMSNorm."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def published_forward(
    name: str,
    state: State,
    layer: int,
    raw: dict[str, Tensor],
    act: Any = functional.gelu,
    floor: float = 1e-3,
    eps: float = 1e-6,
) -> Tensor:
    """Output of the release's own code, `[B, H, T]`.

    Args:
        raw: `hidden`, the `stream` before its norm, and as heads the projections `q`, `k`, `v` before RoPE,
            and `k_rope`.
        act, floor: of WG-KV.
        eps: of DMS.
    """
    prefix = SHAPES[name][0].format(layer)
    own = {
        key.removeprefix(prefix): tensor.double() for key, tensor in state.items() if key.startswith(prefix)
    }

    def affine(x: Tensor, part: str) -> Tensor:
        return functional.linear(x, own[f"{part}weight"], own.get(f"{part}bias"))

    raw = {side: tensor.double() for side, tensor in raw.items()}
    x, silu = raw["hidden"], functional.silu
    match name:
        case "kvzap_linear":
            out = affine(x, "")
        case "kvzap_mlp":
            out = affine(functional.gelu(affine(x, "0.")), "2.")
        case "trimkv":
            out = functional.logsigmoid(affine(silu(affine(x, "linear1.")), "linear2.") + own["bias"])
        case "dbtrimkv":
            inner = silu(affine(silu(affine(x, "linear1.")), "linear2."))
            out = functional.logsigmoid(affine(inner, "linear3.") + own["bias"])
        case "locret" | "locret_phi3":
            sides = [raw[side].transpose(1, 2).flatten(2) for side in ("q", "k", "v")]
            out = affine(silu(affine(torch.cat(sides, -1), "fc1.")), "fc2.")
        case "fastkvzip":
            queries, keys = (affine(x, f"{side}_proj.").view(2, T, H, -1, 3) for side in ("q", "k"))
            queries = rms(queries, own["q_norm.weight"]).transpose(1, 2).transpose(-1, -2)
            keys = rms(keys, own["k_norm.weight"]).transpose(1, 2)
            logit = keys @ queries / 3**0.5 + own["b"].unsqueeze(2)
            logit_base = own["k_base"] @ queries / 3**0.5
            share = 1 / (1 + torch.exp(logit_base - logit).sum(-2, keepdim=True))
            return share.mean(-1).squeeze(-1)
        case "wgkv":
            norms = [
                rms(raw["k"], own["pre_key_norm.weight"]),
                rms(raw["k_rope"], own["post_key_norm.weight"]),
            ]
            channels = torch.cat(norms, -1).transpose(2, 3).flatten(1, 2)
            inner = act(functional.conv1d(channels, own["conv1.weight"], own["conv1.bias"], groups=H))
            logit = functional.conv1d(inner, own["conv2.weight"], own["conv2.bias"], groups=H)
            return torch.sigmoid(logit).clamp(min=floor)
        case "dms":
            out = (
                affine(rms(raw["stream"], own["dms_proj_alpha_norm.weight"], eps), "dms_proj_alpha.") * 10 - 2
            )
        case "dms_query":
            queries = rms(affine(x, "q_proj.").view(2, T, Q, D).transpose(1, 2), own["q_norm.weight"], eps)
            return queries[:, :: Q // H, :, -1] * 10 - 2
    return out.transpose(1, 2)


def shown(layer: int) -> tuple[Evidence, dict[str, Tensor]]:
    B, positions_BT = 2, torch.arange(T).expand(2, T)
    raw = {
        "hidden": torch.randn(B, T, E),
        "stream": torch.randn(B, T, E),
        "q": torch.randn(B, Q, T, D),
        "k": torch.randn(B, H, T, D),
        "v": torch.randn(B, H, T, D),
    }
    raw["k_rope"] = ROTARY.rotate(raw["k"], positions_BT)
    evidence = Evidence(
        layer_idx=layer,
        queries_BQSD=ROTARY.rotate(raw["q"], positions_BT),
        keys_BHTD=raw["k_rope"],
        values_BHTD=raw["v"],
        output_weight_QDE=torch.randn(Q, D, E),
        scaling=0.5,
        positions_BT=positions_BT,
        valid_BT=torch.ones(B, T, dtype=torch.bool),
        hidden_BTE=raw["hidden"],
        stream_BTE=raw["stream"],
        rotary=ROTARY,
    )
    return evidence, raw


def assert_scores(gates: GateSet, name: str, state: State, eps: float = 1e-6) -> None:
    """Scores are the release's numbers: as they are, their exponential (KVzap), their logarithm (WG-KV), or
    minus them, each of the token after the entry (DMS)."""
    for layer in gates.layers:
        evidence, raw = shown(layer)
        expected = published_forward(name, state, layer, raw, eps=eps)
        found = gates.score(evidence).values_BHT
        if name.startswith("kvzap"):
            found = found.log()  # the release says the logarithm
        elif name == "wgkv":
            assert (expected == 1e-3).any() and (expected > 1e-3).any()
            expected = expected.log()
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
    state = release(name, tmp_path / "release")
    for own in (kind, "auto"):
        gates = import_published(tmp_path / "release", SIZES, kind=own)
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
    state = release("locret", tmp_path)
    assert_scores(import_published(tmp_path / "model.safetensors", SIZES), "locret", state)
    (tmp_path / "model.safetensors").unlink()
    for number in range(3):
        some = {key: state[key] for key in sorted(state)[number::3]}
        save_file(some, tmp_path / f"model-0000{number + 1}-of-00003.safetensors")
    assert_scores(import_published(tmp_path, SIZES), "locret", state)
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


def pickled(name: str, path: Path) -> State:
    """The release as its authors' training writes it: a pickle."""
    state = tensors(name)
    if name != "fastkvzip":
        torch.save(state, path)
        return state
    layers = [
        {key.split(".", 2)[2]: tensor for key, tensor in state.items() if key.startswith(f"module.{layer}.")}
        for layer in range(2)
    ]
    loss = torch.tensor([[0.5, 0.25]], dtype=torch.float64).numpy()
    torch.save({"module": layers, "loss": loss, "acc_train": loss, "steps": 50}, path)
    return state


@pytest.mark.parametrize("name", ["dbtrimkv", "fastkvzip", "trimkv", "wgkv"])
def test_a_pickled_release_is_refused_and_converted(name: str, tmp_path: Path) -> None:
    state = pickled(name, tmp_path / "weights.pt")
    with refusal("weights.pt is a pickle, .*--convert .*weights.pt --out .*weights.s"):
        import_published(tmp_path, SIZES)
    with refusal("is a pickle, which is a program"):
        import_published(tmp_path / "weights.pt", SIZES)
    target = unpickle(tmp_path / "weights.pt", tmp_path / "made" / "weights.safetensors")
    assert_scores(import_published(target, SIZES), name, state)


class Program:
    """A program in a pickle."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return print, ("ran",)


def test_a_pickle_that_runs_code_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"module": [Program()]}, tmp_path / "bad.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "bad.pt").read_bytes()[:50])
    torch.save({"steps": 3}, tmp_path / "none.pt")
    for name, message in {
        "bad": "could not be read without running its code",
        "cut": "could not be read without",
        "none": "holds no tensor",
        "nowhere": "there is no file .*nowhere.pt to convert",
    }.items():
        with refusal(message):
            unpickle(tmp_path / f"{name}.pt", tmp_path / "out.safetensors")
    assert "ran" not in capsys.readouterr().out and not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "part", "extra"),
    [
        ("kvzap_mlp", "2.bias", None),
        ("fastkvzip", "k_base", "extra"),
        ("trimkv", "bias", "linear9.weight"),
        ("locret", "fc2.weight", "fc3.weight"),
        ("wgkv", "conv2.bias", "value_norm.weight"),
        ("dms", "dms_proj_alpha_norm.weight", "dms_proj_alpha_norm.bias"),
        ("dms_query", "q_norm.weight", "q_norm.bias"),
    ],
)
def test_a_tensor_that_is_missing_or_too_many_is_named(
    name: str, part: str, extra: str | None, tmp_path: Path
) -> None:
    state, prefix = release(name, tmp_path), SHAPES[name][0]
    without = [{key: each for key, each in state.items() if key != prefix.format(i) + part} for i in range(2)]
    save(without[1], tmp_path)
    with refusal(f"incomplete: '{part}' of layer 1 is missing"):
        import_published(tmp_path, SIZES)
    save(without[0], tmp_path)
    with refusal("missing"):
        import_published(tmp_path, SIZES, kind=RELEASES[name][0])
    if extra:
        save({**state, prefix.format(1) + extra: torch.zeros(3)}, tmp_path)
        with refusal(f"'{extra}' of layer 1 is .*, and the model's sizes want none of it"):
            import_published(tmp_path, SIZES)


@pytest.mark.parametrize("name", sorted(RELEASES))
@pytest.mark.parametrize("size", ["E", "H", "Q", "D"])
def test_gates_of_another_width_are_refused(name: str, size: str, tmp_path: Path) -> None:
    release(name, tmp_path)
    other = {layer: {**sizes, size: 2 * sizes[size]} for layer, sizes in SIZES.items()}
    if size not in RELEASES[name][4]:
        assert import_published(tmp_path, other).family == RELEASES[name][1]
        return
    with refusal("is not of this model.* of layer 0 is .* the model's sizes want"):
        import_published(tmp_path, other)


def test_gates_of_a_model_with_other_layers_are_refused(tmp_path: Path) -> None:
    release("kvzap_linear", tmp_path)
    with refusal(r"it has no gate for layers \[2\]; the model's layers are \[0, 1, 2"):
        import_published(tmp_path, {**SIZES, 2: SIZES[0]})
    with refusal(r"it has gates for layers \[1\] beyond it; .* are \[0\]"):
        import_published(tmp_path, {0: SIZES[0]})


def test_what_is_no_published_gate_is_refused(tmp_path: Path) -> None:
    with refusal("there are no published gates at"):
        import_published(tmp_path, SIZES)
    release("wgkv", tmp_path)
    for kind, message in {
        "kvzap": "which is no part of kvzap gates",
        "trimkv": "holds no trimkv gates: no tensor's name is like",
        "kvzapp": "unknown kind of published gates 'kvzapp': did you mean 'kvzap'",
    }.items():
        with refusal(message):
            import_published(tmp_path, SIZES, kind=kind)
    save({"model.norm.weight": torch.ones(3)}, tmp_path)
    with refusal("no gates of a kind that is known .its tensors: model.norm.weight"):
        import_published(tmp_path, SIZES)
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    with refusal("truncated or corrupt .*fetch it again"):
        import_published(tmp_path, SIZES)
    state = tensors("trimkv")
    next(iter(state.values()))[0] = float("nan")
    save(state, tmp_path)
    with refusal("holds no finite fractions"):
        import_published(tmp_path, SIZES)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"retention_gate": "rg3"}, "variant 'rg3' are not read here, only `rg`"),
        ({"text_config": {"retention_gate": "rg3"}}, "variant 'rg3' are not read here"),
        ({"hidden_act": "gleu"}, r"config\.json, .* unknown activation 'gleu': did you mean 'gelu'"),
        ({"hidden_act": {"a": 1}}, r"config\.json"),
        ("{", "config.json is not readable JSON"),
    ],
)
def test_configs_that_are_not_understood_are_refused(config: object, message: str, tmp_path: Path) -> None:
    release("trimkv", tmp_path, config)
    with refusal(message):
        import_published(tmp_path, SIZES)


@pytest.mark.parametrize("name", ["locret", "trimkv", "dbtrimkv"])
@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"text_config": {"hidden_act": "relu"}, "hidden_act": "gelu"}, "relu"),
        ({"text_config": {"hidden_activation": "gelu"}}, "gelu"),
        ({"text_config": {"model_type": "x"}, "hidden_act": "relu"}, "relu"),
        ({"hidden_act": None}, "silu"),
    ],
)
def test_the_activation_is_that_of_the_language_model(
    name: str, config: dict[str, Any], activation: str, tmp_path: Path
) -> None:
    """Read at the top alone, it would be SiLU in a multimodal release, and no shape would tell."""
    release(name, tmp_path, config)
    gates = import_published(tmp_path, SIZES)
    assert gates[0].dims()["activation"] == gates[1].dims()["activation"] == activation


@pytest.mark.parametrize("nested", [False, True])
def test_the_config_of_wgkv_says_activation_and_floor(nested: bool, tmp_path: Path) -> None:
    own = {"g_act_fn": "silu", "g_epsilon": 0.01}
    state = release("wgkv", tmp_path, {"text_config": own} if nested else own)
    for layer in range(2):  # so that some lie below their floor
        state[SHAPES["wgkv"][0].format(layer) + "conv2.bias"].fill_(-4.0)
    save(state, tmp_path)
    gates = import_published(tmp_path, SIZES)
    dims = gates[0].dims()
    assert (dims["activation"], dims["floor"], dims["expand"]) == ("silu", 0.01, 1.5)
    evidence, raw = shown(1)
    expected = published_forward("wgkv", state, 1, raw, act=functional.silu, floor=0.01)
    assert (expected == 0.01).any() and (expected > 0.01).any()
    assert_close(gates.score(evidence).values_BHT, expected.log().float())


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


def test_a_conversion_writes_no_release_over_and_ends_in_safetensors(tmp_path: Path) -> None:
    pickled("trimkv", tmp_path / "weights.pt")
    before = (tmp_path / "weights.pt").read_bytes()
    for target in ("weights.pt", "gates.bin", "gates"):
        with refusal(f"{target} must be another file, and end in .safetensors"):
            unpickle(tmp_path / "weights.pt", tmp_path / target)
    (tmp_path / "weights.pt").rename(tmp_path / "w.safetensors")  # a pickle under a wrong name
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "w.safetensors")
    for target in ("w.safetensors", "link.safetensors"):
        with refusal("must be another file"):
            unpickle(tmp_path / "w.safetensors", tmp_path / target)
    assert (tmp_path / "w.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.safetensors", "w.safetensors"]


def nest(depth: int, wrap: Callable[[Any], Any]) -> Any:
    """A tensor, wrapped so many times."""
    value: Any = torch.ones(1)
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: nest(200, lambda value: {"a": value}), "lists and mappings more than 64 deep"),
        # A few bytes, and as many tensors as 10 to the power of 9.
        (lambda: nest(9, lambda value: [value] * 10), "of more than 262144 values"),
        (lambda: {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, "two tensors of the name 'a.b'"),
        (lambda: {"a": torch.ones(2, 2).to_sparse()}, "RuntimeError"),
        (lambda: {"a": torch.zeros(1).expand(10**12)}, "far more bytes than the file holds"),
    ],
)
def test_a_pickle_of_other_things_is_refused_and_nothing_is_written(
    made: Callable[[], Any], said: str, tmp_path: Path
) -> None:
    torch.save(made(), tmp_path / "weights.pt")
    with refusal(rf"weights\.pt could not be read .*{said}"):
        unpickle(tmp_path / "weights.pt", tmp_path / "gates.safetensors")
    assert not (tmp_path / "gates.safetensors").exists()


def test_a_part_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """Of two files, or of two spellings of a layer, the last one would be taken without a word."""
    state = release("kvzap_linear", tmp_path)
    save_file({"layers.0.bias": torch.zeros(H)}, tmp_path / "other.safetensors")
    with refusal(r"other\.safetensors and model\..* both hold 'layers.0.bias'"):
        import_published(tmp_path, SIZES)
    (tmp_path / "other.safetensors").unlink()
    save({**state, "layers.00.bias": torch.zeros(H)}, tmp_path)
    with refusal(r"holds 'layers.0+.bias' and .* the same part of layer 0"):
        import_published(tmp_path, SIZES)


def test_a_shape_without_numbers_allocates_nothing(tmp_path: Path) -> None:
    """A tensor of 10**12 x 0 has no byte in the file; the layer that it describes would have terabytes."""
    state = release("kvzap_mlp", tmp_path)
    for layer in range(2):
        state[f"layers.{layer}.0.weight"] = torch.zeros(10**12, 0)
    save(state, tmp_path)
    with refusal(r"'0.bias' of layer 0 is \(10,\), and the model's sizes want \(1000000000000,\)"):
        import_published(tmp_path, SIZES)


def test_every_kind_has_a_release_here() -> None:
    assert {kind for kind, *_ in RELEASES.values()} == set(KINDS)
