"""Published gates: files of each release's layout, and scores that equal the release's own forward."""

import json
import re
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

E, H, Q, D, T, F = 12, 2, 8, 4, 9, 10
FINGERPRINT = {"hidden_size": E, "num_heads": Q, "num_kv_heads": H, "head_dim": D, "num_layers": 2}
SIZES = {layer: {"E": E, "H": H, "Q": Q, "D": D} for layer in range(2)}
ROTARY = Rotary(torch.tensor([1.0, 0.1]))
State = dict[str, Tensor]


def linear(name: str, out: int, inner: int, *, bias: bool = True) -> State:
    state = {f"{name}weight": torch.randn(out, inner)}
    return {**state, f"{name}bias": torch.randn(out)} if bias else state


def of_layers(prefix: str, parts: Callable[[], State]) -> State:
    """Tensors of two layers, each with parts of its own."""
    return {f"{prefix.format(layer)}{name}": tensor for layer in range(2) for name, tensor in parts().items()}


ATTENTION = "model.layers.{}.self_attn."
RETENTION = f"{ATTENTION}retention_gate."
KVZAP = {"model_type": "kvzap", "input_dim": E, "output_dim": H, "hidden_dim": F, "n_modules": 2}
WIDE = (2 * H + Q) * D
INNER = 6  # of WG-KV: 1.5 head widths, as released for Qwen3


def kvzap_linear() -> State:
    return of_layers("layers.{}.", lambda: linear("", H, E))


def kvzap_mlp() -> State:
    return of_layers("layers.{}.", lambda: {**linear("0.", F, E), **linear("2.", H, F)})


def fastkvzip() -> State:
    return of_layers(
        "module.{}.",
        lambda: {
            **linear("q_proj.", Q * 3, E),
            **linear("k_proj.", H * 3, E, bias=False),
            "q_norm.weight": torch.rand(3) + 0.5,
            "k_norm.weight": torch.rand(3) + 0.5,
            "k_base": torch.randn(H, 1, 5, 3),
            "b": torch.randn(H, 1, Q // H),
        },
    )


def trimkv() -> State:
    return of_layers(
        RETENTION,
        lambda: {
            **linear("linear1.", F, E),
            **linear("linear2.", H, F, bias=False),
            "bias": torch.randn(H),
        },
    )


def dbtrimkv() -> State:
    return of_layers(
        RETENTION,
        lambda: {
            **linear("linear1.", F, E),
            **linear("linear2.", F, F),
            **linear("linear3.", H, F, bias=False),
            "bias": torch.randn(H),
        },
    )


def locret(phi3: bool = False) -> State:
    """In the whole model; Phi-3 has its three projections in one matrix."""
    state = {"model.embed_tokens.weight": torch.randn(7, E), "lm_head.weight": torch.randn(7, E)}
    return state | of_layers(
        ATTENTION,
        lambda: {
            **linear("fc1.", F, WIDE, bias=False),
            **linear("fc2.", H, F, bias=False),
            **linear("qkv_proj." if phi3 else "q_proj.", WIDE if phi3 else Q * D, E, bias=False),
        },
    )


def wgkv() -> State:
    return of_layers(
        f"{ATTENTION}g_predictors.",
        lambda: {
            "pre_key_norm.weight": torch.rand(D) + 0.5,
            "post_key_norm.weight": torch.rand(D) + 0.5,
            "conv1.weight": torch.randn(H * INNER, 2 * D, 1),
            "conv1.bias": torch.randn(H * INNER),
            "conv2.weight": torch.randn(H, INNER, 1) * 2,
            "conv2.bias": torch.randn(H),
        },
    )


# Name -> kind, our family, unit of the score, tensors, config, and the sizes of the model that they show.
RELEASES: dict[str, tuple[str, str, str, Callable[[], State], dict[str, Any], str]] = {
    "kvzap_linear": ("kvzap", "linear", "rank", kvzap_linear, {**KVZAP, "hidden_dim": None}, "EH"),
    "kvzap_mlp": ("kvzap", "mlp", "rank", kvzap_mlp, KVZAP, "EH"),
    "fastkvzip": ("fastkvzip", "lowrank", "mass", fastkvzip, {}, "EHQ"),
    "trimkv": ("trimkv", "decay", "rank", trimkv, {"retention_gate": "rg", "hidden_act": "silu"}, "EH"),
    "dbtrimkv": ("trimkv", "decay_shared", "rank", dbtrimkv, {"retention_gate": "rg10"}, "EH"),
    "locret": ("locret", "qkv", "mass", locret, {"model_type": "llama", "hidden_act": "silu"}, "HQD"),
    "locret_phi3": ("locret", "qkv", "mass", lambda: locret(phi3=True), {"model_type": "phi3"}, "HQD"),
    "wgkv": ("wgkv", "admission", "rank", wgkv, {}, "HD"),
}


def release(name: str, folder: Path, config: object = None) -> State:
    """The release's files (with a config of its own or another), and the tensors in them."""
    state, own = RELEASES[name][3](), config or RELEASES[name][4]
    folder.mkdir(exist_ok=True)
    save_file(state, folder / "model.safetensors")
    if own:
        (folder / "config.json").write_text(own if isinstance(own, str) else json.dumps(own))
    return state


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """A Llama-style RMSNorm."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def published_forward(name: str, state: State, layer: int, raw: dict[str, Tensor]) -> Tensor:
    """Output of the release's own code, `[B, H, T]`.

    Args:
        raw: `hidden`, and the projections `q`, `k`, `v` before RoPE, as heads, and `k_rope`.
    """

    def part(suffix: str) -> Tensor:
        numbered = {key: re.search(r"(\d+)(\..*)", key) for key in state}
        (found,) = [
            key
            for key, is_of in numbered.items()
            if is_of and is_of[1] == str(layer) and is_of[2].endswith(suffix)
        ]
        return state[found].double()

    x = raw["hidden"].double()
    match name:
        case "kvzap_linear":
            out = functional.linear(x, part(".weight"), part(".bias"))
        case "kvzap_mlp":
            inner = functional.gelu(functional.linear(x, part(".0.weight"), part(".0.bias")))
            out = functional.linear(inner, part(".2.weight"), part(".2.bias"))
        case "trimkv":
            inner = functional.silu(functional.linear(x, part("linear1.weight"), part("linear1.bias")))
            out = functional.logsigmoid(functional.linear(inner, part("linear2.weight")) + part("gate.bias"))
        case "dbtrimkv":
            inner = functional.silu(functional.linear(x, part("linear1.weight"), part("linear1.bias")))
            inner = functional.silu(functional.linear(inner, part("linear2.weight"), part("linear2.bias")))
            out = functional.logsigmoid(functional.linear(inner, part("linear3.weight")) + part("gate.bias"))
        case "locret" | "locret_phi3":
            sides = [raw[side].double().transpose(1, 2).flatten(2) for side in ("q", "k", "v")]
            inner = functional.silu(functional.linear(torch.cat(sides, -1), part("fc1.weight")))
            out = functional.linear(inner, part("fc2.weight"))
        case "fastkvzip":
            return torch.stack([one_fastkvzip(part, sequence) for sequence in x])
        case "wgkv":
            norms = [rms(raw["k"].double(), part("pre_key_norm.weight"))]
            norms.append(rms(raw["k_rope"].double(), part("post_key_norm.weight")))
            channels = torch.cat(norms, -1).transpose(2, 3).flatten(1, 2)
            inner = functional.conv1d(channels, part("conv1.weight"), part("conv1.bias"), groups=H)
            inner = functional.conv1d(
                functional.gelu(inner), part("conv2.weight"), part("conv2.bias"), groups=H
            )
            return torch.sigmoid(inner).clamp(min=1e-3)
    return out.transpose(1, 2)


def one_fastkvzip(part: Callable[[str], Tensor], x: Tensor) -> Tensor:
    """Its inference code's forward, one sequence."""
    queries = functional.linear(x, part("q_proj.weight"), part("q_proj.bias")).view(T, H, -1, 3)
    keys = functional.linear(x, part("k_proj.weight")).view(T, H, -1, 3)
    queries = rms(queries, part("q_norm.weight")).transpose(0, 1).transpose(-1, -2)
    keys = rms(keys, part("k_norm.weight")).transpose(0, 1)
    logit = keys @ queries / 3**0.5 + part("b").unsqueeze(2)
    logit_base = part("k_base") @ queries / 3**0.5
    return (1 / (1 + torch.exp(logit_base - logit).sum(2, keepdim=True))).mean(-1).squeeze(-1)


def shown(layer: int) -> tuple[Evidence, dict[str, Tensor]]:
    B, positions_BT = 2, torch.arange(T).expand(2, T)
    raw = {
        "hidden": torch.randn(B, T, E),
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
        rotary=ROTARY,
    )
    return evidence, raw


def assert_scores(gates: GateSet, name: str, state: State) -> None:
    """Scores are the release's numbers: as they are, their exponential (KVzap), their logarithm (WG-KV)."""
    for layer in gates.layers:
        evidence, raw = shown(layer)
        expected = published_forward(name, state, layer, raw)
        found = gates.score(evidence).values_BHT
        if name.startswith("kvzap"):
            found = found.log()  # the release says the logarithm
        elif name == "wgkv":
            assert (expected == 1e-3).any() and (expected > 1e-3).any()
            expected = expected.log()
        elif name in ("trimkv", "dbtrimkv"):
            expected = expected * torch.arange(T - 1, -1, -1)
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


def test_tensors_lie_in_one_file_or_in_several(tmp_path: Path) -> None:
    state = release("locret", tmp_path)
    assert_scores(import_published(tmp_path / "model.safetensors", SIZES), "locret", state)
    (tmp_path / "model.safetensors").unlink()
    for number in range(3):
        some = {key: state[key] for key in sorted(state)[number::3]}
        save_file(some, tmp_path / f"model-0000{number + 1}-of-00003.safetensors")
    assert_scores(import_published(tmp_path, SIZES), "locret", state)


def test_gates_of_layers_that_the_model_leaves_alone_are_left_out(tmp_path: Path) -> None:
    state = release("fastkvzip", tmp_path)
    gates = import_published(tmp_path, {1: SIZES[1]})
    assert gates.layers == (1,)
    assert_scores(gates, "fastkvzip", state)


def pickled(name: str, path: Path) -> State:
    """The release as its authors' training writes it: a pickle."""
    state = RELEASES[name][3]()
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
    with pytest.raises(
        ValueError, match="weights.pt is a pickle, .*--convert .*weights.pt --out .*weights.s"
    ):
        import_published(tmp_path, SIZES)
    with pytest.raises(ValueError, match="is a pickle, which is a program"):
        import_published(tmp_path / "weights.pt", SIZES)
    target = unpickle(tmp_path / "weights.pt", tmp_path / "made" / "weights.safetensors")
    assert_scores(import_published(target, SIZES), name, state)


def test_a_shared_tensor_of_a_pickle_is_written_under_both_names(tmp_path: Path) -> None:
    state = dbtrimkv()
    for part in ("linear3.weight", "bias"):
        prefix = "model.layers.{}.self_attn.retention_gate." + part
        state[prefix.format(1)] = state[prefix.format(0)]
    torch.save(state, tmp_path / "weights.pth")
    target = unpickle(tmp_path / "weights.pth", tmp_path / "weights.safetensors")
    assert_scores(import_published(target, SIZES), "dbtrimkv", state)


class Program:
    """A program in a pickle."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return print, ("ran",)


def test_a_pickle_that_runs_code_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"module": [Program()]}, tmp_path / "bad.pt")
    with pytest.raises(ValueError, match="could not be read without running code of its own"):
        unpickle(tmp_path / "bad.pt", tmp_path / "out.safetensors")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "bad.pt").read_bytes()[:50])
    with pytest.raises(ValueError, match="could not be read without"):
        unpickle(tmp_path / "cut.pt", tmp_path / "out.safetensors")
    torch.save({"steps": 3}, tmp_path / "none.pt")
    with pytest.raises(ValueError, match="holds no tensor"):
        unpickle(tmp_path / "none.pt", tmp_path / "out.safetensors")
    with pytest.raises(ValueError, match="there is no file .*nowhere.pt to convert"):
        unpickle(tmp_path / "nowhere.pt", tmp_path / "out.safetensors")
    assert "ran" not in capsys.readouterr().out and not (tmp_path / "out.safetensors").exists()


def drop(state: State, end: str) -> State:
    return {key: tensor for key, tensor in state.items() if not key.endswith(end)}


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("kvzap_mlp", "1.2.bias"),
        ("fastkvzip", "1.k_base"),
        ("trimkv", "1.self_attn.retention_gate.bias"),
        ("locret", "1.self_attn.fc2.weight"),
        ("wgkv", "1.self_attn.g_predictors.conv2.bias"),
    ],
)
def test_a_missing_tensor_is_named(name: str, end: str, tmp_path: Path) -> None:
    state = release(name, tmp_path)
    save_file(drop(state, end), tmp_path / "model.safetensors")
    part = end.removeprefix("1.").split("gate.")[-1].split("predictors.")[-1].split("attn.")[-1]
    with pytest.raises(ValueError, match=f"gate for layer 1 as it was released: '{part}' is missing"):
        import_published(tmp_path, SIZES)
    save_file(drop(state, end.replace("1.", "0.", 1)), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="missing"):
        import_published(tmp_path, SIZES, kind=RELEASES[name][0])


@pytest.mark.parametrize("name", ["trimkv", "wgkv", "locret", "fastkvzip"])
def test_a_tensor_too_many_is_named(name: str, tmp_path: Path) -> None:
    state = release(name, tmp_path)
    like = {"trimkv": "linear2.weight", "wgkv": "conv2.bias", "locret": "fc2.weight", "fastkvzip": "k_base"}
    (old,) = [key for key in state if ".1." in key and key.endswith(like[name])]
    part = {"trimkv": "linear9.weight", "wgkv": "value_norm.weight", "locret": "fc3.weight"}.get(
        name, "extra"
    )
    state[old.removesuffix(like[name]) + part] = torch.zeros(3)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"for layer 1 as it was released: '{part}' is no part of it"):
        import_published(tmp_path, SIZES)


@pytest.mark.parametrize("name", sorted(RELEASES))
@pytest.mark.parametrize("size", ["E", "H", "Q", "D"])
def test_gates_of_another_width_are_refused(name: str, size: str, tmp_path: Path) -> None:
    release(name, tmp_path)
    other = {layer: {**sizes, size: 2 * sizes[size]} for layer, sizes in SIZES.items()}
    if size not in RELEASES[name][5]:
        assert import_published(tmp_path, other).family == RELEASES[name][1]
        return
    with pytest.raises(ValueError, match="is not of this model: .* of layer 0 is .* the model's sizes want"):
        import_published(tmp_path, other)


def test_gates_of_a_model_with_other_layers_are_refused(tmp_path: Path) -> None:
    release("kvzap_linear", tmp_path)
    with pytest.raises(
        ValueError, match=r"it has no gate for layers \[2\]; the model's layers are \[0, 1, 2"
    ):
        import_published(tmp_path, {**SIZES, 2: SIZES[0]})
    with pytest.raises(ValueError, match=r"it has gates for layers \[1\] beyond it; .* are \[0\]"):
        import_published(tmp_path, {0: SIZES[0]})


def test_what_is_no_published_gate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are no published gates at"):
        import_published(tmp_path, SIZES)
    release("wgkv", tmp_path)
    with pytest.raises(ValueError, match="which is no part of kvzap gates"):
        import_published(tmp_path, SIZES, kind="kvzap")
    with pytest.raises(ValueError, match="holds no trimkv gates: no tensor's name is like"):
        import_published(tmp_path, SIZES, kind="trimkv")
    with pytest.raises(ValueError, match="unknown kind of published gates 'kvzapp': did you mean 'kvzap'"):
        import_published(tmp_path, SIZES, kind="kvzapp")
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no gates of a kind that is known .its tensors: model.norm.weight"):
        import_published(tmp_path, SIZES)
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    with pytest.raises(ValueError, match="truncated or corrupt .*fetch it again"):
        import_published(tmp_path, SIZES)
    next(iter((state := release("trimkv", tmp_path)).values()))[0] = float("nan")
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="numbers that are not finite"):
        import_published(tmp_path, SIZES)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"retention_gate": "rg3"}, "variant 'rg3' are not read here, only `rg`"),
        ({"text_config": {"retention_gate": "rg3"}}, "variant 'rg3' are not read here"),
        ({"hidden_act": "gleu"}, r"config\.json, .* unknown activation 'gleu': did you mean 'gelu'"),
        ({"hidden_act": ["silu"]}, r"config\.json"),
        ({"hidden_act": {"a": 1}}, r"config\.json"),
        ("{", "config.json is not readable JSON"),
        ("[" * 100_000, "config.json is not readable JSON"),
    ],
)
def test_configs_that_are_not_understood_are_refused(config: object, message: str, tmp_path: Path) -> None:
    release("trimkv", tmp_path, config)
    with pytest.raises(ValueError, match=message):
        import_published(tmp_path, SIZES)


@pytest.mark.parametrize("name", ["locret", "trimkv", "dbtrimkv"])
@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"text_config": {"hidden_act": "gelu"}}, "gelu"),
        ({"text_config": {"hidden_act": "relu"}, "hidden_act": "gelu"}, "relu"),
        ({"text_config": {"hidden_activation": "gelu"}}, "gelu"),
        ({"hidden_activation": "relu", "hidden_act": "gelu"}, "relu"),
        ({"text_config": {"model_type": "x"}, "hidden_act": "relu"}, "relu"),
        ({"text_config": None, "hidden_act": "relu"}, "relu"),
        ({"text_config": None}, "silu"),
        ({"hidden_act": None}, "silu"),
        ({"hidden_act": "relu"}, "relu"),
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
    state = release("wgkv", tmp_path)
    for name in state:
        if name.endswith("conv2.bias"):
            state[name] = torch.full((H,), -4.0)  # so that some lie below their floor
    save_file(state, tmp_path / "model.safetensors")
    own = {"g_act_fn": "silu", "g_epsilon": 0.01}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": own} if nested else own))
    gates = import_published(tmp_path, SIZES)
    dims = gates[0].dims()
    assert (dims["activation"], dims["floor"], dims["expand"]) == ("silu", 0.01, 1.5)
    evidence, raw = shown(1)
    part = {name.split("g_predictors.")[1]: t.double() for name, t in state.items() if ".1." in name}
    sides = [rms(raw["k"].double(), part["pre_key_norm.weight"])]
    sides.append(rms(raw["k_rope"].double(), part["post_key_norm.weight"]))
    channels = torch.cat(sides, -1).transpose(2, 3).flatten(1, 2)
    inner = functional.silu(functional.conv1d(channels, part["conv1.weight"], part["conv1.bias"], groups=H))
    logit = functional.conv1d(inner, part["conv2.weight"], part["conv2.bias"], groups=H)
    expected = torch.sigmoid(logit).clamp(min=0.01)
    assert (expected == 0.01).any() and (expected > 0.01).any()
    assert_close(gates.score(evidence).values_BHT, expected.log().float())


def test_a_conversion_writes_no_release_over_and_ends_in_safetensors(tmp_path: Path) -> None:
    pickled("trimkv", tmp_path / "weights.pt")
    before = (tmp_path / "weights.pt").read_bytes()
    for target in ("weights.pt", "gates.bin", "gates"):
        with pytest.raises(
            ValueError, match=f"{target} is to be a safetensors file.*: end it in .safetensors"
        ):
            unpickle(tmp_path / "weights.pt", tmp_path / target)
    (tmp_path / "weights.pt").rename(tmp_path / "w.safetensors")  # a pickle under a wrong name
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "w.safetensors")
    for target in ("w.safetensors", "link.safetensors"):
        with pytest.raises(ValueError, match="is the pickled release itself, which is kept: name another"):
            unpickle(tmp_path / "w.safetensors", tmp_path / target)
    assert (tmp_path / "w.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.safetensors", "w.safetensors"]


def test_of_several_pickles_all_are_named(tmp_path: Path) -> None:
    for name in ("qwen3-8b.pt", "llama.pt"):
        pickled("trimkv", tmp_path / name)
    wanted = (
        "holds pickles .*llama.pt, .*qwen3-8b.pt., .*--convert FILE --out FILE.safetensors.*import FILE.saf"
    )
    with pytest.raises(ValueError, match=wanted):
        import_published(tmp_path, SIZES)


def nested(depth: int) -> Any:
    value: Any = torch.ones(1)
    for _ in range(depth):
        value = {"a": value}
    return value


def holds_itself() -> Any:
    value: list[Any] = [torch.ones(1)]
    value.append(value)
    return value


def doubled(times: int) -> Any:
    """Lists that share what they hold: a few bytes, and as many tensors as 10 to this power."""
    value: Any = torch.ones(1)
    for _ in range(times):
        value = [value] * 10
    return value


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: nested(200), "nests lists and mappings more than 64 deep"),
        (holds_itself, "nests lists and mappings more than 64 deep"),
        (lambda: doubled(9), "holds more than 262144 values"),
        (lambda: {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, "two tensors of the name 'a.b'"),
        (lambda: {1: torch.ones(1), "1": torch.zeros(1)}, "two tensors of the name '1'"),
        (lambda: {"a": torch.ones(2, 2).to_sparse()}, "holds 'a', a torch.sparse_coo tensor"),
        (lambda: {"a": torch.ones(2, device="meta")}, "holds 'a', a meta tensor"),
        (lambda: {"a": torch.ones(2, dtype=torch.complex64)}, "holds 'a', of torch.complex64"),
        (lambda: {"a": torch.zeros(1).expand(10**12)}, "describes 4000000000000 bytes of tensors"),
    ],
)
def test_a_pickle_of_other_things_is_refused_and_nothing_is_written(
    made: Callable[[], Any], said: str, tmp_path: Path
) -> None:
    torch.save(made(), tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=rf"weights\.pt .*{said}.*: pass the file with the gates' weights"):
        unpickle(tmp_path / "weights.pt", tmp_path / "gates.safetensors")
    assert not (tmp_path / "gates.safetensors").exists()


def test_a_part_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """Of two files, or of two spellings of a layer, the last one would be taken without a word."""
    state = release("kvzap_linear", tmp_path)
    save_file({"layers.0.bias": torch.zeros(H)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"other\.safetensors and model\..* both hold 'layers.0.bias'"):
        import_published(tmp_path, SIZES)
    (tmp_path / "other.safetensors").unlink()
    save_file({**state, "layers.00.bias": torch.zeros(H)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds 'layers.0+.bias' and .* the same part of layer 0"):
        import_published(tmp_path, SIZES)


def test_a_shape_without_numbers_allocates_nothing(tmp_path: Path) -> None:
    """A tensor of 10**12 x 0 has no byte in the file; the layer that it describes would have terabytes."""
    state = release("kvzap_mlp", tmp_path)
    for layer in range(2):
        state[f"layers.{layer}.0.weight"] = torch.zeros(10**12, 0)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"'0.weight' of layer 0 is \[1000000000000, 0\]"):
        import_published(tmp_path, SIZES)


def test_every_kind_has_a_release_here() -> None:
    assert {kind for kind, *_ in RELEASES.values()} == set(KINDS)
