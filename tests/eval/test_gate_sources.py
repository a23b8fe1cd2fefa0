"""Several sets of gates in one comparison, and the controls that are made of them."""

import copy
import json
import math
import pickle
import shutil
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear

import retain
from retain.config import load
from retain.eval.compare import compare, describe_run
from retain.eval.config import CompareConfig, GateSource, Line, gate_names, gate_users
from retain.eval.report.kept import collect
from retain.eval.run.checks import check
from retain.eval.run.evaluated_model import EvaluatedModels, Unit, load_evaluated, plan
from retain.eval.run.gate_sources import (
    load_source,
    other_layer,
    random_gates,
    random_seed,
    source_identity,
    weights_sha256,
)
from retain.eval.run.results_store import Row, gates_identity, open_run, read_manifest, read_rows
from retain.eval.run.runner import run_all, run_unit
from retain.gates import GATES, GateSet, build_gates, dims_for, settings_of
from retain.gates.artifact import METADATA_FILE, load_gates, save_gates
from retain.gates.calibrate import Calibrator
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from retain.hf.intercept.lookahead_pass import lookahead_gates
from retain.hf.model.decoder import describe
from retain.hf.model.identity import fingerprint
from tests.eval.stub import MORE_STUB, STUB, save_stub_gates, stub_config, stub_model

SETS = {
    "rep": GateSource("{there}/rep-seed{{seed}}"),
    "drawn": GateSource(control="random"),
    "behind": GateSource(control="other_layer"),
}
VARIANTS = {f"{name}_{own}": (name,) for name in ("gate", "fused") for own in SETS}
USES = {name: name.partition("_")[2] for name in VARIANTS}


def trained(model, *, family: str = "linear", seed: int = 5, calibrated: bool = True) -> GateSet:
    """Gates with weights of some size, input statistics, and curves at another level in each head."""
    torch.manual_seed(seed)
    specs = describe(model)
    dims = dims_for(family, {spec.layer_idx: spec.sizes for spec in specs})
    curves = {spec.layer_idx: Calibrator(H=spec.num_kv_heads, K=4) for spec in specs} if calibrated else None
    gates = build_gates(family, dims, calibrators=curves)
    for layer in gates.layers:
        gates[layer].input_mean_E.normal_()
        gates[layer].input_scale_E.uniform_(0.5, 2.0)
        if calibrated:
            curve = gates.calibrators[str(layer)]
            curve.offset_H.add_(-3.0 - 2 * torch.rand(curve.H))
    thresholds = {"keep_ratio": [0.2, 0.5], "threshold": [0.4, 0.1]}
    gates.metadata = {"calibration": {"curve": thresholds}} if calibrated else {}
    return gates.eval().requires_grad_(False)


def evidence_of(model, gates):
    cache = Cache(model, policy=None)
    cache.prefill(torch.arange(2, 42)[None], evict=False, hold_evidence=True, wanted=gates.inputs)
    return cache.evidence


@pytest.fixture(scope="module")
def model():
    made = stub_model(0)
    attach(made)
    return made


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """Two folders of gates for each of two seeds, one of them calibrated."""
    folder = tmp_path_factory.mktemp("gates")
    save_stub_gates(folder, (0, 1))
    for seed in (0, 1):
        own = stub_model(seed)
        save_gates(trained(own, seed=seed + 9), folder / f"rep-seed{seed}", fingerprint=fingerprint(own))
    return folder


def config_of(there, tmp_path=None, **changes) -> CompareConfig:
    sets = {name: replace(own, folder=own.folder.format(there=there)) for name, own in SETS.items()}
    sets["drawn"] = replace(sets["drawn"], folder=sets["rep"].folder)
    given = {
        "policies": ("snapkv", "gate", *VARIANTS),
        "variants": VARIANTS,
        "gate_sets": sets,
        "uses": USES,
        "keep_ratios": (0.45,),
        "tasks": ("turns",),
        "results": str(tmp_path or there / "results"),
    }
    return stub_config(there, **(given | changes))


def test_a_random_gate_has_fresh_weights_and_the_levels_of_the_trained_one(model):
    gates = trained(model)
    before, drawn_before = copy.deepcopy(gates.state_dict()), torch.random.get_rng_state()
    made = random_gates(gates, 3)
    assert torch.equal(torch.random.get_rng_state(), drawn_before)
    assert all(torch.equal(own, before[name]) for name, own in gates.state_dict().items())
    for evidence in evidence_of(model, gates):
        layer = evidence.layer_idx
        gate, known = made[layer], gates[layer]
        assert not torch.allclose(gate.out.weight, known.out.weight, atol=1e-3)
        x_BTE = (evidence.hidden_BTE - known.input_mean_E) / known.input_scale_E
        out_BHT = linear(x_BTE, gate.out.weight, gate.out.bias).transpose(1, 2)
        levels = gates.calibrators[str(layer)].offset_H.double().tolist()
        score = made.score(evidence)
        assert score.unit == "risk" and len(set(levels)) == len(levels)
        for head, level in enumerate(levels):
            wanted = [math.exp(float(out) + level) for out in out_BHT[0, head]]
            assert score.values_BHT[0, head].tolist() == pytest.approx(wanted, rel=1e-4)
    assert made.metadata == {**gates.metadata, "control": "random", "sha256": weights_sha256(made)}
    assert weights_sha256(made) == weights_sha256(random_gates(gates, 3))
    assert weights_sha256(random_gates(gates, 4)) != weights_sha256(made) != weights_sha256(gates)
    assert len({random_seed(seed, name) for seed in (0, 1) for name in ("drawn", "other")}) == 4


@pytest.mark.parametrize("family", sorted(set(GATES) - {"lookahead"}))
def test_random_gates_of_every_family_tell_entries_apart(model, family):
    settings = {"F": 8} if "F" in settings_of(family) else {}
    gates = retain.new_gates(model, family, **settings)
    made = random_gates(gates, 1)
    assert (made.family, made.unit, made.inputs) == (gates.family, gates.unit, gates.inputs)
    for evidence in evidence_of(model, gates):
        for row in made.score(evidence).values_BHT[0]:
            assert len(set(row.tolist())) > 30, family


def test_a_random_gate_keeps_the_unit_of_calibrated_ones(model):
    specs = describe(model)
    dims = dims_for("linear", {spec.layer_idx: spec.sizes for spec in specs})
    of_head = {"H": specs[0].num_kv_heads, "K": 2, "unit": "mass"}
    curves = {spec.layer_idx: Calibrator(**of_head) for spec in specs}
    gates = build_gates("linear", dims, calibrators=curves)
    made = random_gates(gates, 1)
    assert made.unit == gates.unit == "mass"
    assert all(made.score(own).values_BHT.isfinite().all() for own in evidence_of(model, gates))


def test_a_gate_of_another_layer_is_the_next_ones_with_its_calibrator(model):
    gates = trained(model)
    made, layers = other_layer(gates), gates.layers
    assert len(layers) == 3
    for place, evidence in enumerate(evidence_of(model, gates)):
        other = layers[(place + 1) % len(layers)]
        x_BTE = (evidence.hidden_BTE - gates[other].input_mean_E) / gates[other].input_scale_E
        out_BHT = linear(x_BTE, gates[other].out.weight, gates[other].out.bias).transpose(1, 2)
        score = made.score(evidence)
        assert torch.allclose(score.values_BHT, gates.calibrators[str(other)](out_BHT.exp()))
        assert not torch.allclose(score.values_BHT, gates.score(evidence).values_BHT, rtol=0.1)
    assert made[layers[0]] is not gates[layers[1]]
    assert made.metadata == {**gates.metadata, "control": "other_layer", "sha256": weights_sha256(made)}
    assert weights_sha256(made) != weights_sha256(gates)


def test_one_layer_has_no_other_and_unlike_layers_cannot_stand_in():
    dims = {0: {"E": 8, "H": 2}, 1: {"E": 8, "H": 4}}
    with pytest.raises(ValueError, match="'other_layer' .* these gates have layer 0 alone: take control"):
        other_layer(build_gates("linear", {0: dims[0]}))
    with pytest.raises(ValueError, match=r"layer 0 by the gate of layer 1, .*unlike sizes \(H 2 and 4\)"):
        other_layer(build_gates("linear", dims))


def test_who_takes_which(there):
    config = config_of(there)
    wanted = {"gate": "gates", "gate_rep": "rep", "gate_drawn": "drawn", "gate_behind": "behind"}
    wanted |= {f"fused_{name}": name for name in SETS}
    assert gate_users(config) == wanted and gate_names(config) == ("gates", *SETS)
    assert config.gates_of(1, "rep") == str(there / "rep-seed1")
    assert config.gates_of(1, "behind") == config.gates_of(1) == str(there / "gates-seed1")
    assert gate_names(replace(config, policies=("snapkv", "oracle"))) == ()
    assert gate_names(replace(config, policies=("oracle", "gate_rep"))) == ("rep",)
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("path", ["shared", "chunked", "prefill+decode"])
def test_each_set_scores_as_it_would_alone(there, path):
    regimes = ("context_only", "query_aware") if path == "shared" else (path,)
    config = config_of(there, regimes=regimes, every=3)
    if path != "shared":  # a cache for every cell: slow
        config = replace(config, policies=("snapkv", "gate", "fused_rep", "gate_drawn", "gate_behind"))
    unit = Unit(0, "turns", 0, 2 if path == "shared" else 1, path)
    rows = run_unit(config, MORE_STUB, load_evaluated(config, MORE_STUB, 0), unit).rows
    kept = set()
    for name in SETS:
        alone = there / f"alone-{name}"
        save_gates(load_source(config, 0, name), alone, fingerprint=fingerprint(stub_model(0)))
        policies = {own: VARIANTS[own][0] for own in config.policies if USES.get(own) == name}
        single = replace(config, gates=str(alone), policies=tuple(policies.values()), uses={}, gate_sets={})
        own = run_unit(single, MORE_STUB, load_evaluated(single, MORE_STUB, 0), unit).rows
        called = {base: policy for policy, base in policies.items()}
        wanted = [
            replace(row, policy=called[row.policy], base_policy=called[row.policy], unit_rows=0)
            for row in own
            if row.policy != "full"
        ]
        assert [row.gates for row in wanted] == [gates_identity(alone)["sha256"][:12]] * len(wanted)
        found = [replace(row, unit_rows=0) for row in rows if row.policy in policies]
        assert sorted(map(_plain, found)) == sorted(map(_plain, wanted)) and wanted
        kept.add(tuple(row.needles_kept for row in found))
    assert len(kept) == len(SETS)  # the sets do not keep the same
    told = {row.policy: (row.gates, row.gate_bytes, row.trained) for row in rows}
    assert told["snapkv"] == told["full"] == ("", 0, False)
    assert told["gate"][0] == gates_identity(there / "gates-seed0")["sha256"][:12]
    # Curves of four knots beside the weights, where the other sets have none, or two numbers a knot.
    rep = "gate_rep" if path == "shared" else "fused_rep"
    assert told[rep][1] > told["gate_drawn"][1] > told["gate_behind"][1] == told["gate"][1] > 0


def _plain(row: Row) -> str:
    return json.dumps({name: str(own) for name, own in vars(row).items()}, sort_keys=True)


def test_lookahead_tokens_of_two_sets_are_read_apart(tmp_path):
    save_stub_gates(tmp_path)
    for name, seed in (("one", 1), ("two", 2)):
        own = stub_model(0)
        torch.manual_seed(seed)
        gates = lookahead_gates(own, num_tokens=4, rank=2)
        for up in gates.extension.up.values():
            up.data.normal_(std=0.1)
        save_gates(gates, tmp_path / name, fingerprint=fingerprint(own))
    own = stub_model(0)  # and one that looks at what no other does
    save_gates(retain.new_gates(own, "qkv", F=8), tmp_path / "qkv", fingerprint=fingerprint(own))
    sets = {name: GateSource(str(tmp_path / name)) for name in ("one", "two", "qkv")}
    variants = {f"gate_{name}": ("gate",) for name in sets}
    config = stub_config(
        tmp_path,
        policies=("gate", *variants),
        variants=variants,
        gate_sets=sets,
        uses={f"gate_{name}": name for name in sets},
        keep_ratios=(0.45,),
        regimes=("context_only",),
    )
    unit, kept = Unit(0, "turns", 0, 1), {}
    for row in run_unit(config, MORE_STUB, load_evaluated(config, MORE_STUB, 0), unit).rows:
        kept.setdefault(row.policy, []).append((row.needles_kept, row.tokens))
    for name in sets:
        single = replace(config, gates=str(tmp_path / name), policies=("gate",), uses={}, gate_sets={})
        rows = run_unit(single, MORE_STUB, load_evaluated(single, MORE_STUB, 0), unit).rows
        own = [(row.needles_kept, row.tokens) for row in rows if row.policy == "gate"]
        assert kept[f"gate_{name}"] == own
    assert len({str(kept[name]) for name in config.policies}) > 2
    shown = collect(config, MORE_STUB, lambda ids: [*map(str, ids)], documents=1, command="")
    lines = shown["documents"][0]["kept"]
    assert len({json.dumps(one["layers"]) for one in lines}) == len(lines) == 4


def test_the_run_is_its_weights_and_not_their_names(there, tmp_path):
    config = config_of(there, tmp_path, tasks=("pair",), regimes=("context_only",), items_per_task=1)
    units = [unit.key for unit in plan(config, STUB)]
    open_run(config.folder, describe_run(config, STUB), units)
    run_all(config, STUB)
    identity = read_manifest(config.folder)["identity"]
    assert identity["gates"] == {"0": gates_identity(there / "gates-seed0")}
    assert identity["gates_of_policies"]["gate_rep"] == {"0": gates_identity(there / "rep-seed0")}
    drawn = identity["gates_of_policies"]["fused_drawn"]["0"]
    assert drawn["control"] == "random" and drawn == source_identity(config, 0, "drawn")
    told = {row["policy"]: row["gates"] for row in read_rows(config.folder)}
    for policy, of_seeds in identity["gates_of_policies"].items():
        assert told[policy] == of_seeds["0"]["sha256"][:12]

    def renamed(policy, name, new):
        sets = {**config.gate_sets, new: config.gate_sets[name]}
        return replace(config, gate_sets=sets, uses={**config.uses, policy: new})

    # Another name for a set of the same weights is the same run; random weights follow from the name.
    moved = renamed("gate_rep", "rep", "again")
    assert describe_run(moved, STUB)["identity"] == describe_run(config, STUB)["identity"]
    open_run(moved.folder, describe_run(moved, STUB), units)
    assert run_all(moved, STUB) == 0  # nothing is left to run
    other = renamed("gate_drawn", "drawn", "redrawn")
    with pytest.raises(ValueError, match=r"these fields differ: gates_of_policies\.gate_drawn\.0\.sha256"):
        open_run(other.folder, describe_run(other, STUB), units)
    # Without sets, a run is what it was before there were any.
    plain = replace(config, policies=("gate",), uses={})
    assert "gates_of_policies" not in describe_run(plain, STUB)["identity"]
    assert not {"gate_sets", "uses"} & set(describe_run(plain, STUB)["identity"]["config"])


def test_what_earlier_releases_fitted_beside_the_weights_is_no_part_of_the_run(there, tmp_path):
    """Fusion weights and quotas are numbers of gates.json, which nothing reads any more."""
    for name in ("one", "two"):
        shutil.copytree(there / "gates-seed0", tmp_path / name)
    path = tmp_path / "two" / METADATA_FILE
    metadata = json.loads(path.read_text())
    fitted = dict.fromkeys(("fusion", "quotas"), {"fitted": "again"})
    metadata["calibration"] = {**(metadata.get("calibration") or {}), **fitted}
    path.write_text(json.dumps(metadata))

    def identity(name):
        own = {"uses": {"mine": "own"}, "gate_sets": {"own": GateSource(str(tmp_path / name))}}
        config = stub_config(tmp_path, policies=("mine",), variants={"mine": ("fused",)}, **own)
        return source_identity(config, 0, "own")

    assert identity("one") == identity("two") == gates_identity(tmp_path / "one")


def test_seeds_that_share_a_model_share_folders_and_draw_their_own(there):
    suite = replace(STUB, seeds=None)
    config = config_of(there, seeds=(0, 1), gates=str(there / "gates-seed0"))
    shared = GateSource(str(there / "rep-seed0"))
    config = replace(config, gate_sets={**config.gate_sets, "rep": shared, "drawn": GateSource("", "random")})
    held = EvaluatedModels(config, replace(suite, load_model=lambda _: stub_model(0)))
    first = {**held.of(0).sets}
    second = {**held.of(1).sets}
    assert [name for name in first if first[name] is second[name]] == ["gates", "rep", "behind"]
    assert weights_sha256(first["drawn"]) != weights_sha256(second["drawn"])


def test_everything_wrong_with_sets_is_said_before_work_starts(there, tmp_path):
    config = config_of(
        there,
        tmp_path,
        seeds=(0, 1),
        gate_sets={"gates": GateSource("x{seed}"), "rep": GateSource("rep")},
        uses={"gate_rp": "rep", "fused_rep": "repp", "snapkv": "rep", "oracle": "rep"},
    )
    with pytest.raises(ValueError) as caught:
        check(config, STUB)
    for part in (
        "`gate_sets` names a set 'gates', which is what the folder `gates` is called",
        "unknown policy 'gate_rp' (did you mean 'gate_rep'?)",
        "`uses` gives 'fused_rep' unknown gates 'repp' (did you mean 'rep'?); known: gates, rep",
        "`uses` gives gates to 'snapkv', which takes none",
        "`uses` gives gates to 'oracle', which takes none",
        "`gate_sets.rep.folder` needs a {seed} in it, since there are 2 seeds; got 'rep'",
    ):
        assert part in str(caught.value), part


def test_folders_of_sets_are_looked_at_before_work_starts(there, tmp_path):
    foreign = GateSource(str(there / "rep-seed1"))
    sets = {"none": GateSource(str(tmp_path / "no")), "foreign": foreign, "unused": GateSource("nowhere")}
    variants = {"a": ("gate",), "b": ("fused",)}
    config = config_of(there, tmp_path, policies=("a", "b"), variants=variants, tasks=("pair",))
    config = replace(config, gate_sets=sets, uses={"a": "none", "b": "foreign"})
    with pytest.raises(ValueError) as caught:
        compare(config, STUB)
    assert not config.folder.exists() and "nowhere" not in str(caught.value)
    text = str(caught.value)
    assert f"there are no gates for seed 0 in {tmp_path / 'no'} (gate_sets: none); train them first:" in text
    assert "gates of seed 0 (gate_sets: foreign): " in text and "trained on another model" in text


def test_a_set_that_a_policy_cannot_take_is_refused_before_work_starts(there, tmp_path):
    own = stub_model(0)
    rank = retain.new_gates(own, "decay", F=8)
    save_gates(rank, tmp_path / "rank", fingerprint=fingerprint(own))
    sets = {"rank": GateSource(str(tmp_path / "rank"))}
    for regime in ("context_only", "decode"):
        added = {"added": ("fused", "fusion=sum")}
        config = config_of(there, tmp_path, policies=("added",), variants=added, regimes=(regime,))
        config = replace(config, gate_sets=sets, uses={"added": "rank"}, tasks=("pair",))
        with pytest.raises(ValueError, match="policy 'added' .*wants a gate in 'risk', .* are in 'rank'"):
            check(config, STUB)
    config = replace(config, policies=("snapkv", "gate"), variants={}, uses={"gate": "rank"})
    check(replace(config, regimes=("context_only",)), STUB)


def test_sets_are_written_in_a_config(tmp_path):
    path = tmp_path / "one.yaml"
    path.write_text(
        "run: one\nseeds: [0]\nitems_per_task: 1\ngates: 'g{seed}'\n"
        "gate_sets: {rep: {folder: 'r{seed}'}, drawn: {control: random}}\nuses: {gate: rep, fused: drawn}\n"
    )
    config = load(path, CompareConfig)
    assert config.gate_sets == {"rep": GateSource("r{seed}"), "drawn": GateSource(control="random")}
    assert config.source_of("drawn") == GateSource("g{seed}", "random")
    with pytest.raises(ValueError, match="input should be 'none', 'random' or 'other_layer'.*did you mean"):
        load(path, CompareConfig, ["gate_sets.drawn.control=randm"])


def test_gates_are_trained_beforehand_and_scores_are_not(there):
    config = config_of(there, policies=("snapkv", "gate_rep", "oracle"))
    evaluated = load_evaluated(config, STUB, 0)
    told = {name: evaluated.trained(Line(name, name)) for name in ("full", *config.policies)}
    assert told == {"full": False, "snapkv": False, "gate_rep": True, "oracle": False}
    assert load_gates(there / "rep-seed0").metadata["sha256"][:12] == evaluated.gates_sha(
        Line("gate_rep", "gate_rep")
    )
