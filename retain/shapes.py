"""Defines the shape of a layer, and the letters of axes that names, annotations, docs and kernels use.

A tensor that crosses a function boundary carries its axes as a suffix (`keys_BHTD`), and public functions
annotate them with the same letters through jaxtyping (`Float[Tensor, "B H T D"]`; one-letter axes are written
`" B"`). Layout is head first, as in Hugging Face caches. A digit is a literal size or an offset: `offsets_R1`
is `[R + 1]`. Other axes are lower-case words (`"B Q rows T"`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

LEGEND: Mapping[str, str] = MappingProxyType(
    {
        "B": "sequences of the batch",
        "L": "attention layers",
        "H": "KV heads",
        "Q": "query heads",
        "G": "query heads that share one KV head, G = Q / H",
        "T": "entries seen by one KV head, padding included",
        "S": "query positions of this call (or of the observation window)",
        "D": "head width",
        "E": "model width",
        "F": "hidden width of a gate",
        "R": "ragged rows of a layer, R = B * H, head fastest",
        "N": "entries held over all rows",
        "C": "capacity: entries for which a store has room, C >= N",
        "W": "queries of an observation window",
        "K": "keep ratios, or keep sets, looked at together",
        "V": "token ids of the vocabulary",
        "P": "pairs that a ranking loss draws",
    }
)


def axis_of(name: str, letter: str) -> int | None:
    """Position of an axis in the suffix of a tensor's name, or None.

    Examples:
        >>> axis_of("keys_BHTD", "T"), axis_of("scaling", "T")
        (2, None)
    """
    axes = name.rpartition("_")[2]
    return axes.index(letter) if axes.isupper() and letter in axes else None


@dataclass(frozen=True)
class LayerShape:
    """Heads of a layer, and bytes of its entries.

    Args:
        num_heads: H, KV heads.
        entry_bytes: bytes of one key and value.
        metadata_bytes: bytes that attention reads with an entry once something went: a budget that is less
            than everything holds fewer entries for them.
        widths: channels of a key and of a value; None: half of the entry's numbers each.
        element_size: bytes of a number.
        packed_bytes, head_bytes: bytes of an entry, in the mean, and of a head apart from its entries, where
            they are held in fewer bytes (`retain.cache.precision.Precision.cost`); None: they are not.
    """

    num_heads: int
    entry_bytes: int
    metadata_bytes: int = 0
    widths: tuple[int, int] | None = None
    element_size: int = 2
    packed_bytes: Fraction | None = None
    head_bytes: Fraction = Fraction(0)

    @property
    def paid_bytes(self) -> Fraction:
        """Bytes that an entry takes."""
        packed = self.entry_bytes if self.packed_bytes is None else self.packed_bytes
        return Fraction(packed + self.metadata_bytes)

    def bytes_of(self, entries: int) -> Fraction:
        """Bytes of a layer that keeps so many entries."""
        return entries * self.paid_bytes + self.num_heads * self.head_bytes
