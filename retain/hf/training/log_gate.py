"""Turns a gate's output into a log gate, the logarithm that soft attention adds: at most 0, 0 is open.

What its paper adds is the family's own (`Gate.log_gate`), and the default; `logistic` and `above` are for
gates that were trained to regress a risk first.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from retain.gates import Gate

ToLogGate = Callable[[Tensor, Gate], Tensor]


def own_form(output_BHT: Float[Tensor, "B H T"], gate: Gate) -> Float[Tensor, "B H T"]:
    """The gate's own `log_gate`, in float32 at least: what its family's paper adds to the logits.

    Args:
        output_BHT: what the gate gave.
        gate: the gate.

    Raises:
        ValueError: its family says no openness.
    """
    return gate.log_gate(output_BHT.to(torch.promote_types(output_BHT.dtype, torch.float32)))


def logistic(output_BHT: Float[Tensor, "B H T"], gate: Gate) -> Float[Tensor, "B H T"]:
    """`log(r / (1 + r))` of an entry's risk `r`: `logsigmoid` of a gate whose unit is `log_risk`.

    An entry whose risk is one is half open. That one is a number like any other to a gate that was trained to
    regress risks, most of which lie far below: such a gate begins almost shut, and wants `above(threshold)`.
    A fresh gate is opened with `gate.start_at_(torch.full([H], 5.0))` (TRIM-KV starts at 18).

    Args:
        output_BHT: what the gate gave, in its own unit.
        gate: the gate, for its unit.

    Raises:
        ValueError: its unit is not a risk.
    """
    return functional.logsigmoid(_log_risk(output_BHT, gate))


def above(threshold: float, temperature: float = 1.0) -> ToLogGate:
    """`logsigmoid((log r - threshold) / temperature)`: half open where the risk is `exp(threshold)`.

    For gates that were trained to regress log-risk first: with the log-risk at which the budget would cut as
    the threshold, what would be kept is open, and what would go is not, in the order of the gate.

    Args:
        threshold: natural logarithm of a risk.
        temperature: log-risk over which a gate opens; smaller is harder.

    Raises:
        ValueError: a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"above: temperature={temperature} must be positive (1.0 is one unit of log-risk).")

    def to_log_gate(output_BHT: Tensor, gate: Gate) -> Tensor:
        return functional.logsigmoid((_log_risk(output_BHT, gate) - threshold) / temperature)

    return to_log_gate


def _log_risk(output_BHT: Tensor, gate: Gate) -> Tensor:
    """A gate's output as log-risk, float32 at least."""
    output_BHT = output_BHT.to(torch.promote_types(output_BHT.dtype, torch.float32))
    if gate.unit == "log_risk":
        return output_BHT
    if gate.unit == "risk":
        return output_BHT.clamp_min(torch.finfo(output_BHT.dtype).tiny).log()
    raise ValueError(
        f"a gate in units of {gate.unit!r} says no risk, and nothing follows for how far it is open: pass "
        "to_log_gate=, a function of (output_BHT, gate) that gives logarithms of at most 0."
    )


def check_log_gate(given: Any, shape: tuple[int, int, int], exists_BT: Tensor | None, layer: int) -> None:
    """That `to_log_gate` gives logarithms of at most 0: asked of one layer, since it waits for the device."""
    said = f"to_log_gate, in layer {layer}, "
    if not isinstance(given, Tensor) or tuple(given.shape) != shape or not given.is_floating_point():
        found = f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise ValueError(f"{said}gave {found}: wanted floating point {shape}, that is [B, H, T].")
    known = given.detach()
    if exists_BT is not None:  # what a model makes of padding is nobody's concern
        known = known.masked_fill(~exists_BT[:, None].to(given.device), 0.0)
    if known.numel() and bool(known.isnan().any()):
        raise ValueError(f"{said}gave NaN: wanted logarithms of at most 0.")
    if known.numel() and float(known.max()) > 0:
        raise ValueError(
            f"{said}gave {float(known.max()):.4g}: wanted natural logarithms, of at most 0, of how far "
            "entries are open (an openness of 0 .. 1 is not one: return its log)."
        )
