"""Formats the entries that each layer and head holds as a table.

One row a layer; a batch shows the mean of its sequences.
"""

from dataclasses import dataclass

from jaxtyping import Int64
from torch import Tensor

# A table of more heads than these shows their range and not each of them.
WIDEST = 16


@dataclass(frozen=True)
class BudgetTable:
    """Entries held.

    Args:
        held_BLH: per sequence, layer and KV head.
        seen_B: tokens that each sequence has seen.
        policy: name of the policy.
    """

    held_BLH: Int64[Tensor, "B L H"]
    seen_B: Int64[Tensor, " B"]
    policy: str = ""

    @property
    def share_LH(self) -> Tensor:
        """Share of what was seen that each head holds, mean over the sequences."""
        return (self.held_BLH / self.seen_B.clamp_min(1)[:, None, None]).mean(0)

    def __str__(self) -> str:
        B, _, H = self.held_BLH.shape
        each = H <= WIDEST
        held_LH = self.held_BLH.double().mean(0)
        names = [f"head {h}" for h in range(H)] if each else ["least", "most"]
        head = f"{'':>9} {'all':>10} {'of seen':>8} " + " ".join(f"{name:>8}" for name in names)
        title = f"entries held, policy {self.policy}" + (f", mean of {B} sequences" if B > 1 else "")
        lines = [title, head]
        shares = self.share_LH
        for idx, row in enumerate(held_LH):
            cells = row.tolist() if each else [float(row.min()), float(row.max())]
            numbers = " ".join(f"{cell:>8,.0f}" for cell in cells)
            lines.append(
                f"{f'layer {idx}':>9} {float(row.sum()):>10,.0f} {float(shares[idx].mean()):>8.1%} {numbers}"
            )
        total = float(held_LH.sum())
        lines.append(f"{'total':>9} {total:>10,.0f} {float(shares.mean()):>8.1%}")
        return "\n".join(lines)
