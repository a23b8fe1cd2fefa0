"""Gates as a peft adapter: one more adapter of a model, saved and loaded the way its users know.

A gate is a child of the attention module and wraps nothing, so that the model computes what it did, and
`retain.attach`, LoRA beside it and a merge of that know nothing of it.

The artifact (`retain.gates.artifact`) remains the format of gates; this is for those whose tools speak peft.
Its limits, all of peft's making:

- peft knows its methods by a closed enumeration. `register()` adds a member to it by hand; nothing upstream
  promises that this goes on working.
- Only a process that called `register()` can read such an adapter: in others peft raises `KeyError:
  'RETAIN'`.
- Gates that share parameters, look at more than the attention input, are calibrated or extend the model have
  no place here.

    from retain.hf.model import adapter

    model = adapter.wrap(model, retain.load_gates("runs/gates", model))
    model.save_pretrained("runs/gates-adapter")

    adapter.register()
    model = PeftModel.from_pretrained(model, "runs/gates-adapter")
    cache = retain.Cache(model, policy="gate", keep_ratio=0.2, gates=adapter.gates_of(model))
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from retain.gates import GATES, Gate, GateSet
from retain.hf.model.decoder import base_model, describe
from retain.process.extras import require
from retain.registry import lookup

with require("train", "peft", what="an adapter of peft that holds gates"):
    from peft import PeftConfig, PeftModel, get_peft_model
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    from peft.utils import PeftType, register_peft_method

# peft's name for our method, and what the names of an adapter's containers begin with.
NAME, PREFIX = "retain", "retain_"
# The child of an attention module that carries its gates: without the prefix, by which peft tells what lies
# inside an adapter.
CHILD = "eviction_gates"
_NO_MERGE = (
    "gates are no change to the model's weights, so there is nothing to merge: take adapter.gates_of(model) "
    "and call unload()."
)


@dataclass
class GateConfig(PeftConfig):
    """What an adapter's JSON says of its gates.

    Args:
        family: a name in `retain.gates.GATES`.
        gates: name of an attention module in the model -> the keyword arguments of its gate.
        metadata: of the gate set (fingerprint of the base model, recipe, ...).
        target_modules: the attention modules; made of `gates`.
    """

    family: str = "linear"
    gates: dict[str, dict[str, Any]] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    target_modules: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        register()
        self.peft_type = PeftType[NAME.upper()]
        self.target_modules = sorted(self.gates)


class GateLayer(nn.Module, BaseTunerLayer):
    """The gates of one attention module, one per adapter.

    peft finds the tensors of an adapter by their names, and puts the adapter's name behind the first part
    after the prefix: so each leaf module of a gate has a `ModuleDict` of its own here, and each tensor that
    belongs to the gate itself a `ParameterDict`.

    Args:
        projection: of the attention module, for peft, which asks where it lies.
    """

    def __init__(self, projection: nn.Module):
        super().__init__()
        self.beside = (projection,)  # in a tuple: it is no child of ours
        self.dims: dict[str, tuple[str, dict[str, Any]]] = {}
        self.metadata: dict[str, dict[str, Any]] = {}
        self.adapter_layer_names: tuple[str, ...] = ()
        self.other_param_names: tuple[str, ...] = ()

    def get_base_layer(self) -> nn.Module:
        return self.beside[0]

    def add_(self, adapter_name: str, family: str, dims: Mapping[str, Any]) -> None:
        """Make room for an adapter's gate, with fresh weights."""
        gate = lookup(family, GATES, what="gate family")(**dims)
        self.dims[adapter_name] = (family, {**dims})
        for name, part in _parts(gate).items():
            trained, attribute = not isinstance(part, Tensor) or part.requires_grad, _attribute(name)
            if isinstance(part, Tensor):
                part = nn.Parameter(part.detach().clone(), requires_grad=trained)
            if not hasattr(self, attribute):
                setattr(self, attribute, nn.ParameterDict() if isinstance(part, Tensor) else nn.ModuleDict())
            getattr(self, attribute)[adapter_name] = part
            names = "adapter_layer_names" if trained else "other_param_names"
            setattr(self, names, tuple(dict.fromkeys((*getattr(self, names), attribute))))
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters)

    def delete_adapter(self, adapter_name: str) -> None:
        super().delete_adapter(adapter_name)
        self.dims.pop(adapter_name, None)
        self.metadata.pop(adapter_name, None)

    def _move_adapter_to_device_of_base_layer(
        self, adapter_name: str, device: torch.device | None = None
    ) -> None:
        """Where the attention module is; gates keep their own precision."""
        device = next(self.beside[0].parameters()).device if device is None else device
        for attribute in (*self.adapter_layer_names, *self.other_param_names):
            if adapter_name not in getattr(self, attribute):  # a part that another adapter's family has
                continue
            part = getattr(self, attribute)[adapter_name]
            tensors = [part] if isinstance(part, nn.Parameter) else list(part.parameters())
            for tensor in tensors:
                if tensor.device.type != "meta":
                    tensor.data = tensor.data.to(device)

    def gate(self, adapter_name: str) -> Gate:
        """An adapter's gate, on the same parameters."""
        family, dims = self.dims[adapter_name]
        gate = GATES[family](**dims)
        for name in _parts(gate):
            own = getattr(self, _attribute(name))[adapter_name]
            parent, _, leaf = name.rpartition(".")
            if name in gate._buffers:
                gate._buffers[name] = own.data
            else:
                setattr(gate.get_submodule(parent), leaf, own)
        return gate

    @torch.no_grad()
    def load_(self, adapter_name: str, gate: Gate) -> None:
        """Copy a gate's tensors into an adapter's."""
        own = self.gate(adapter_name).state_dict()
        for name, tensor in gate.state_dict().items():
            own[name].copy_(tensor)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise ValueError(_NO_MERGE)


def _parts(gate: Gate) -> dict[str, nn.Module | Tensor]:
    """Leaf modules of a gate that hold parameters, and tensors of the gate itself, by their names."""
    return {
        **dict(gate.named_parameters(recurse=False)),
        **dict(gate.named_buffers(recurse=False)),
        **{
            name: leaf for name, leaf in gate.named_modules() if name and list(leaf.parameters(recurse=False))
        },
    }


def _attribute(name: str) -> str:
    """Under which a part of a gate is held: peft reads no further than the first dot."""
    return PREFIX + name.replace(".", "__")


class GateModel(BaseTuner):
    """peft's side of it: which modules carry gates, and how they are put there and taken away."""

    prefix = PREFIX
    tuner_layer_cls = GateLayer
    target_module_mapping: dict[str, list[str]] = {}

    def _prepare_adapter_config(self, peft_config: GateConfig, model_config: dict) -> GateConfig:
        if not peft_config.gates:
            raise ValueError(
                "this adapter's config names no gates: make one with adapter.wrap(model, gates), or "
                "adapter.config_of(model, gates)."
            )
        return peft_config

    def _create_and_replace(
        self,
        peft_config: GateConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        """Give an attention module a child."""
        name = next(name for name in peft_config.gates if f".{current_key}".endswith(f".{name}"))
        if not hasattr(target, CHILD):
            projection = next(module for module in target.children() if list(module.parameters()))
            setattr(target, CHILD, GateLayer(projection))
        layer: GateLayer = getattr(target, CHILD)
        layer.add_(adapter_name, peft_config.family, peft_config.gates[name])
        layer.metadata[adapter_name] = peft_config.metadata
        if adapter_name not in self.active_adapters:
            layer.set_requires_grad(adapter_name, False)

    def _unload_and_optionally_merge(  # type: ignore[override]  # peft's own returns the model, too
        self,
        merge: bool = True,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> nn.Module:
        if merge:
            raise ValueError(_NO_MERGE)
        for module in self.model.modules():
            if isinstance(getattr(module, CHILD, None), GateLayer):
                delattr(module, CHILD)
        if hasattr(self.model, "peft_config"):
            del self.model.peft_config
        return self.model


def register() -> None:
    """Tell peft of our method, by hand: its names are members of a closed enumeration. Harmless twice."""
    member = NAME.upper()
    if member in PeftType.__members__:
        return
    value = str.__new__(PeftType, member)
    value._name_, value._value_ = member, member
    PeftType._member_map_[member] = value
    PeftType._value2member_map_[member] = value
    PeftType._member_names_.append(member)
    type.__setattr__(PeftType, member, value)
    register_peft_method(name=NAME, config_cls=GateConfig, model_cls=GateModel, prefix=PREFIX)


def config_of(model: nn.Module, gates: GateSet) -> GateConfig:
    """The config of an adapter for these gates of a causal language model.

    Raises:
        ValueError: gates that have no place in an adapter, or of other layers than the model's.
    """
    problems = []
    if gates.inputs != frozenset({"hidden"}):
        problems.append(f"they look at {', '.join(sorted(gates.inputs))}, not at the attention input alone")
    if gates.extension is not None or len(gates.calibrators):
        problems.append("they are calibrated, or extend the model")
    if len(list(gates.parameters())) != len(list(gates.named_parameters(remove_duplicate=False))):
        problems.append("their layers share parameters")
    if problems:
        raise ValueError(
            f"gates of family {gates.family!r} cannot be a peft adapter: {'; '.join(problems)}. Save them as "
            "an artifact (retain.gates.artifact.save_gates)."
        )
    modules = {id(module): name for name, module in base_model(model).named_modules()}
    names = {spec.layer_idx: modules[id(spec.module)] for spec in describe(model)}
    if missing := sorted(set(gates.layers) ^ set(names)):
        raise ValueError(
            f"these gates and {type(model).__name__} differ in layers {missing}: gates are for "
            f"{list(gates.layers)}, and the model evicts in {sorted(names)}. Load gates that were trained on "
            "this model."
        )
    return GateConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=getattr(model, "name_or_path", None) or None,
        family=gates.family,
        gates={names[layer]: gates[layer].dims() for layer in gates.layers},
        metadata={**gates.metadata},
    )


def wrap(model: nn.Module, gates: GateSet, adapter_name: str = "default") -> PeftModel:
    """The model with the gates as a peft adapter.

    Args:
        model: a causal language model of transformers, or a `PeftModel` that carries gates already.
        gates: their values are copied; training the adapter does not change them.
        adapter_name: peft's name for it.

    Raises:
        ValueError: as `config_of`.
    """
    config = config_of(model, gates)
    if isinstance(model, PeftModel):
        model.add_adapter(adapter_name, config)
    else:
        model = get_peft_model(model, config, adapter_name=adapter_name)
    for layer, own in _carried(model).items():
        own.load_(adapter_name, gates[layer])
    return model


def gates_of(model: nn.Module, adapter_name: str | None = None) -> GateSet:
    """The gates that a `PeftModel` carries, on the same parameters: training one trains the other.

    Args:
        adapter_name: which adapter; None: the active one.

    Raises:
        ValueError: it carries none, none of that name, or none that is enabled.
    """
    layers = _carried(model)
    first = layers[min(layers)]
    if adapter_name is None:
        if first.disable_adapters or len(first.active_adapters) != 1:
            state = "disabled" if first.disable_adapters else f"{len(first.active_adapters)} at once"
            raise ValueError(
                f"the active adapters of this model are {state}: name one (adapter_name=) of "
                f"{sorted(first.dims)}, or enable it."
            )
        (adapter_name,) = first.active_adapters
    lookup(adapter_name, first.dims, what="adapter of gates")
    gates = {layer: own.gate(adapter_name) for layer, own in layers.items()}
    return GateSet(gates, first.metadata[adapter_name])


def _carried(model: nn.Module) -> dict[int, GateLayer]:
    """Index of each layer that evicts -> what its attention module carries."""
    layers = {}
    for spec in describe(model):
        layer = getattr(spec.module, CHILD, None)
        if not isinstance(layer, GateLayer):
            raise ValueError(
                f"layer {spec.layer_idx} of this model carries no gates: adapter.wrap(model, gates), or "
                "adapter.register() and PeftModel.from_pretrained(model, folder)."
            )
        layers[spec.layer_idx] = layer
    return layers
