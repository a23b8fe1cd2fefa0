"""Reads a cache that holds everything: chooses pages for each query, gathers them, attends, and counts bytes.

A layer's rows are those of its `RaggedStore`. Of a query, every page gets a score by the method, pages that
are always read come first, and as many are taken as the budget buys (`retain.reading.budget`); of equal
scores the later page. What is chosen is gathered into rows of whole kernel pages, over which the op
`retain.kernels.ragged_attention` runs as over any store. Several queries choose one after another, each as if
the tokens behind it had not come.

Counted are the bytes of the tensors that are read: keys and values that are gathered (or all, where a layer
is read whole), and of the index bounds of pages, vectors of clusters, or dominant channels. FASA's dominant
channels of chosen tokens count twice, since they are read twice.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from retain.cache.attend import attend
from retain.cache.store import RaggedStore, normal_tensors
from retain.kernels.ragged_attention.pages import PAGE, Pages, pages_for
from retain.ranking import order_entries
from retain.reading.baselines import random_scores, recency_scores
from retain.reading.budget import ReadRequest, forced_pages
from retain.reading.fasa import dominant_channels, pair_scores
from retain.reading.mpcache import clusters, inside, mixed_scores
from retain.reading.page_index import PageIndex
from retain.reading.quest import bound_scores, bounds

# Layouts of gathered rooms that are remembered.
MOST_LAYOUTS = 8


@dataclass(frozen=True)
class ReadBytes:
    """What decoded tokens have read of one sequence, in the mean over those tokens.

    Args:
        steps: tokens that were counted.
        entries: bytes of keys and values.
        index: bytes that were read to choose.
        full: bytes of keys and values of all entries seen.
    """

    steps: int
    entries: float
    index: float
    full: float

    @property
    def total(self) -> float:
        """Bytes a step: keys, values and index."""
        return self.entries + self.index


@dataclass(frozen=True)
class Chosen:
    """Entries that one query of every row reads.

    Args:
        index_RN: their places in the store, ascending by position; behind `counts_R` of them no entry.
        counts_R: how many.
    """

    index_RN: Int[Tensor, "R N"]
    counts_R: Int[Tensor, " R"]


class Reader:
    """The side of a cache that reads; it holds the index and the counts of a conversation.

    Args:
        request: the policy with its budget.
    """

    def __init__(self, request: ReadRequest):
        self.request = request
        self.places = {layer.layer_idx: place for place, layer in enumerate(request.layers)}
        self.index: dict[int, list[PageIndex]] = {
            layer.layer_idx: self._new_index() for layer in request.layers
        }
        self.steps_B: list[int] = []
        self.full_B: list[int] = []
        # Bytes [B, 2] of a layer, on its device: entries, index.
        self.read: dict[int, Int[Tensor, "B 2"]] = {}
        self.seeds_B: Sequence[int] = ()
        # Of the forward that runs, tokens that each query sees; 0: padding.
        self.seen_SB: list[list[int]] = []
        # FASA's channels of a layer, on its device.
        self.channels: dict[int, Int[Tensor, "H c"]] = {}
        self.layouts: dict[tuple[int, int, torch.device], tuple[Pages, Tensor]] = {}

    @property
    def questions(self) -> bool:
        """Whether the tokens of a later read choose too."""
        return self.request.reading.questions

    def _new_index(self) -> list[PageIndex]:
        own = self.request.reading
        if own.by == "quest":
            return [PageIndex(own.page, bounds)]
        if own.by == "mpcache":
            return [clusters(own.coarse_page, own.alpha), clusters(own.page, own.alpha)]
        return []

    def check(self, lengths_B: Sequence[int]) -> None:
        """Find a budget that is too small for what comes behind so many tokens.

        Raises:
            ValueError: it is.
        """
        for length in lengths_B:
            self.request.pages_of(length + 1)

    def begin(self, seen_SB: Sequence[Sequence[int]] | None, seeds_B: Sequence[int] | None) -> None:
        """A forward begins.

        Args:
            seen_SB: of each new token and sequence how many tokens it sees, itself included, 0 for padding;
                None: this forward reads everything.
            seeds_B: of the sequences, for random pages.

        Raises:
            ValueError: a budget that holds less than what is always read; nothing was changed.
        """
        found = [list(row) for row in seen_SB or ()]
        for length in {length for row in found for length in row if length}:
            self.request.pages_of(length)
        self.seen_SB, self.seeds_B = found, seeds_B or range(len(found[0]) if found else 0)
        for row in found:
            self.steps_B = self.steps_B or [0] * len(row)
            self.full_B = self.full_B or [0] * len(row)
            self.steps_B = [own + (length > 0) for own, length in zip(self.steps_B, row, strict=True)]
            full = map(self.request.full_bytes, row)
            self.full_B = [own + more for own, more in zip(self.full_B, full, strict=True)]

    def attend_of(self, layer_idx: int, store: RaggedStore) -> Callable[..., Float[Tensor, "B Q S D"]]:
        """What a layer attends by in the forward that runs: `retain.cache.attend.attend`, or the same over
        what is chosen."""
        if not self.seen_SB:
            return attend

        def attended(queries_BQSD: Tensor, *entries: Tensor, **how: Any) -> Tensor:
            return self._attend(layer_idx, store, queries_BQSD, *entries, **how)

        return attended

    def _attend(
        self,
        layer_idx: int,
        store: RaggedStore,
        queries_BQSD: Tensor,
        keys_CD: Tensor,
        values_CD: Tensor,
        offsets_R1: Tensor,
        lengths_R: Tensor,
        seen_RS: Tensor,
        **how: Any,
    ) -> Tensor:
        """Attention of each query over what it chooses; arguments as `retain.cache.attend.attend`."""
        place, parts = self.places[layer_idx], []
        for s, seen_B in enumerate(self.seen_SB):
            one_BQ1D, seen_R = queries_BQSD[:, :, s : s + 1], seen_RS[:, s]
            pages_B = [self.request.pages_of(seen)[place] if seen else 0 for seen in seen_B]
            if all(pages is None or not seen for pages, seen in zip(pages_B, seen_B, strict=True)):
                alone = how if len(self.seen_SB) == 1 else {**how, "runs": None}
                self._count(layer_idx, store, seen_R, 0)
                out = attend(
                    one_BQ1D,
                    keys_CD,
                    values_CD,
                    offsets_R1,
                    lengths_R,
                    seen_R[:, None],
                    **alone,
                )
            else:
                chosen = self.choose(layer_idx, store, one_BQ1D[:, :, 0], seen_B, pages_B)
                out = self._attend_chosen(store, one_BQ1D, chosen, **how)
            parts.append(out)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _attend_chosen(self, store: RaggedStore, queries_BQ1D: Tensor, chosen: Chosen, **how: Any) -> Tensor:
        """Exact attention over what was chosen, gathered into rooms of equal size."""
        R, N = chosen.index_RN.shape
        pages, offsets_R1 = self._layout(R, pages_for(max(1, N)), store.keys_CD.device)
        room = pages.counts[0] * PAGE
        index_RN = store.offsets_R1[:-1, None].expand(R, room).clone()
        index_RN[:, :N] = chosen.index_RN
        counts_R = chosen.counts_R.to(torch.int32)
        kept: dict[str, Any] = {name: how.get(name) for name in ("scaling", "soft_cap", "sinks_Q")}
        return attend(
            queries_BQ1D,
            store.keys_CD[index_RN.flatten()],
            store.values_CD[index_RN.flatten()],
            offsets_R1,
            counts_R,
            counts_R[:, None],
            pages=pages,
            **kept,
        )

    @normal_tensors()
    def _layout(self, rows: int, count: int, device: torch.device) -> tuple[Pages, Tensor]:
        """Rooms of so many kernel pages for each row."""
        wanted = rows, count, device
        if wanted not in self.layouts:
            pages = Pages.of([count] * rows, device)
            self.layouts = dict([*self.layouts.items(), (wanted, (pages, pages.offsets()))][-MOST_LAYOUTS:])
        return self.layouts[wanted]

    @torch.no_grad()
    def choose(
        self,
        layer_idx: int,
        store: RaggedStore,
        queries_BQD: Float[Tensor, "B Q D"],
        seen_B: Sequence[int],
        pages_B: Sequence[int | None],
    ) -> Chosen:
        """Choose what one query of each row reads, and count it.

        Args:
            queries_BQD: after RoPE.
            seen_B: tokens that the query of each sequence sees.
            pages_B: pages that a head of it reads; None: all.
        """
        own, heads, device = self.request.reading, store.num_heads, store.keys_CD.device
        rows = [row for row in range(len(seen_B)) for _ in range(heads)]
        there_B = [-(-seen // own.page) for seen in seen_B]
        taken_B = [there if pages is None else pages for pages, there in zip(pages_B, there_B, strict=True)]
        seen_R = torch.tensor([seen_B[row] for row in rows], device=device)
        taken_R = torch.tensor([taken_B[row] for row in rows], device=device)
        score_RP, index_R = self._scores(layer_idx, store, queries_BQD, seen_B)
        page_P = torch.arange(max(there_B), device=device)
        score_RP = self._always(score_RP, seen_B, heads, own.page)
        score_RP = score_RP.masked_fill(page_P >= -(-seen_R[:, None] // own.page), float("-inf"))
        best_RN = order_entries(score_RP)[:, : max(taken_B)]
        rank_N = torch.arange(best_RN.shape[1], device=device)
        # Behind what is taken stands a page that nobody has.
        pages_RN = best_RN.masked_fill(rank_N >= taken_R[:, None], max(there_B)).sort(-1).values
        entry_RN = (pages_RN[..., None] * own.page + torch.arange(own.page, device=device)).flatten(1)
        good_RN = entry_RN < seen_R[:, None]
        counts_R = good_RN.sum(-1)
        first_R1 = store.offsets_R1[:-1, None]
        whole_B = torch.tensor([pages is None for pages in pages_B], device=device)
        index_R = index_R.masked_fill(whole_B.repeat_interleave(heads), 0)
        self._count(layer_idx, store, counts_R, index_R)
        return Chosen(torch.where(good_RN, first_R1 + entry_RN, first_R1), counts_R)

    def _always(self, score_RP: Tensor, seen_B: Sequence[int], heads: int, page: int) -> Tensor:
        """Scores, infinite for the pages that are always read."""
        own = self.request.reading
        always_BP = torch.zeros(len(seen_B), score_RP.shape[1], dtype=torch.bool)
        for row, seen in enumerate(seen_B):
            always_BP[row, sorted(forced_pages(seen, page, own.sinks, own.recent))] = True
        always_RP = always_BP.to(score_RP.device).repeat_interleave(heads, dim=0)
        return score_RP.masked_fill(always_RP, float("inf"))

    def _scores(
        self, layer_idx: int, store: RaggedStore, queries_BQD: Tensor, seen_B: Sequence[int]
    ) -> tuple[Float[Tensor, "R P"], Int[Tensor, " R"]]:
        """Scores of all pages by the method, and the bytes of the index that were read for them, a row."""
        own, heads, device = self.request.reading, store.num_heads, store.keys_CD.device
        there = max(-(-seen // own.page) for seen in seen_B)
        seen_R = torch.tensor([seen for seen in seen_B for _ in range(heads)], device=device)
        if own.by == "recency":
            return recency_scores(len(seen_R), there).to(device), torch.zeros_like(seen_R)
        if own.by == "random":
            score_RP = random_scores(self.seeds_B, layer_idx, heads, seen_B, there)
            return score_RP.to(device), torch.zeros_like(seen_R)
        dtype = torch.promote_types(queries_BQD.dtype, torch.float32)
        queries_RGD = queries_BQD.to(dtype).unflatten(1, (heads, -1)).flatten(0, 1)
        vector = store.keys_CD.shape[1] * store.keys_CD.element_size()
        lengths_R = seen_R.tolist()
        if own.by == "quest":
            (pages,) = self.index[layer_idx]
            scored = bound_scores(queries_RGD, pages.update(store, lengths_R))
            return self._together(scored, there), seen_R // own.page * 2 * vector
        if own.by == "fasa":
            return self._dominant(layer_idx, store, queries_RGD, seen_R, there)
        coarse, fine = self.index[layer_idx]
        score_RC = self._together(
            mixed_scores(queries_RGD, coarse.update(store, lengths_R)),
            max(-(-seen // own.coarse_page) for seen in seen_B),
        )
        kept_RC = self._coarse(layer_idx, score_RC, seen_B, heads)
        each = own.coarse_page // own.page
        scored = mixed_scores(queries_RGD, fine.update(store, lengths_R))
        full_RP = torch.arange(there, device=device) < seen_R[:, None] // own.page
        looked_RP = kept_RC.repeat_interleave(each, dim=1)[:, :there] & full_RP
        read_R = (seen_R // own.coarse_page + looked_RP.sum(-1)) * vector
        return inside(self._together(scored, there), kept_RC, each), read_R

    def _together(self, score_RGP: Float[Tensor, "R G full"], num_pages: int) -> Float[Tensor, "R P"]:
        """One score a page for the group; the page that is not full yet has none, and is always read."""
        by = self.request.reading.group
        score_RP = score_RGP.amax(1) if by == "max" else score_RGP.mean(1)
        missing = num_pages - score_RP.shape[1]
        return torch.nn.functional.pad(score_RP, (0, missing), value=float("-inf"))

    def _coarse(
        self, layer_idx: int, score_RC: Tensor, seen_B: Sequence[int], heads: int
    ) -> Bool[Tensor, "R C"]:
        """Coarse clusters in which fine ones are looked at."""
        own, place, device = self.request.reading, self.places[layer_idx], score_RC.device
        there_B = [-(-seen // own.coarse_page) for seen in seen_B]
        wanted_B = [self.request.coarse_of(place, seen) if seen else 0 for seen in seen_B]
        there_R, wanted_R = (
            torch.tensor(counts, device=device).repeat_interleave(heads)[:, None]
            for counts in (there_B, wanted_B)
        )
        score_RC = self._always(score_RC, seen_B, heads, own.coarse_page)
        place_C = torch.arange(score_RC.shape[1], device=device)
        order_RC = order_entries(score_RC.masked_fill(place_C >= there_R, float("-inf")))
        return torch.zeros_like(order_RC, dtype=torch.bool).scatter_(
            1, order_RC, (place_C < wanted_R).expand_as(order_RC)
        )

    def _dominant(
        self, layer_idx: int, store: RaggedStore, queries_RGD: Tensor, seen_R: Tensor, num_pages: int
    ) -> tuple[Float[Tensor, "R P"], Int[Tensor, " R"]]:
        """FASA's score: of a page the largest of its tokens."""
        own, device = self.request.reading, store.keys_CD.device
        assert own.dominant_pairs is not None
        if layer_idx not in self.channels:
            sizes = store.num_heads, self.request.num_pairs, self.request.width
            self.channels[layer_idx] = dominant_channels(own.dominant_pairs, layer_idx, *sizes).to(device)
        channels_Rc = self.channels[layer_idx].repeat(len(seen_R) // store.num_heads, 1)
        token_T = torch.arange(num_pages * own.page, device=device)
        exists_RT = token_T < seen_R[:, None]
        place_RT = store.offsets_R1[:-1, None] + torch.where(exists_RT, token_T, 0)
        keys_RTc = store.keys_CD[place_RT[..., None], channels_Rc[:, None]]
        score_RT = self._together(pair_scores(queries_RGD, keys_RTc, channels_Rc), len(token_T))
        score_RP = score_RT.masked_fill(~exists_RT, float("-inf")).unflatten(1, (-1, own.page)).amax(-1)
        return score_RP, seen_R * channels_Rc.shape[1] * store.keys_CD.element_size()

    def _count(self, layer_idx: int, store: RaggedStore, entries_R: Tensor, index_R: Tensor | int) -> None:
        """Count what a layer has read."""
        index_R = index_R if isinstance(index_R, Tensor) else torch.zeros_like(entries_R)
        both_R2 = torch.stack(
            [entries_R.to(torch.int64) * store.entry_bytes, index_R.to(torch.int64)], dim=-1
        )
        both_B2 = both_R2.view(-1, store.num_heads, 2).sum(1)
        before = self.read.get(layer_idx)
        self.read[layer_idx] = both_B2 if before is None else before + both_B2

    def bytes_read(self) -> list[ReadBytes]:
        """What decoded tokens have read of each sequence, over all layers with full attention."""
        totals = sum((own.cpu() for own in self.read.values()), torch.zeros(len(self.steps_B), 2).long())
        return [
            ReadBytes(steps, *(float(count) / max(1, steps) for count in (*read, full)))
            for steps, read, full in zip(self.steps_B, totals.tolist(), self.full_B, strict=True)
        ]

    def index_bytes(self, layer_idx: int) -> int:
        """Bytes that a layer's index holds."""
        return sum(own.num_bytes for own in self.index[layer_idx])

    def index_allocated(self, layer_idx: int) -> int:
        """Bytes of the storage behind a layer's index."""
        return sum(own.bytes_allocated for own in self.index[layer_idx])

    def forget(self) -> None:
        """Forget the index: entries went. It is made anew when a query chooses."""
        for own in self.index.values():
            for part in own:
                part.forget()

    def fork(self) -> "Reader":
        """The same, to go on apart."""
        other = copy.copy(self)
        other.index = {idx: [part.fork() for part in own] for idx, own in self.index.items()}
        other.read = dict(self.read)
        return other

    def select_batch(self, rows: Sequence[int]) -> None:
        """Keep these sequences, in this order; one may repeat."""
        for layer in self.request.layers:
            heads = [row * layer.num_heads + head for row in rows for head in range(layer.num_heads)]
            for part in self.index[layer.layer_idx]:
                part.select(heads)
        self.read = {idx: own[torch.tensor([*rows], device=own.device)] for idx, own in self.read.items()}
        if self.steps_B:
            self.steps_B, self.full_B = ([own[row] for row in rows] for own in (self.steps_B, self.full_B))

    def counts(self) -> dict[str, Any]:
        """What is counted, as a file's header holds it."""
        return {
            "steps_B": self.steps_B,
            "full_B": self.full_B,
            "read": [[idx, own.tolist()] for idx, own in self.read.items()],
        }

    def resume(self, counts: Mapping[str, Any], devices: dict[int, torch.device]) -> None:
        """Go on with what a header holds.

        Raises:
            ValueError: counts that are no whole numbers of at least 0 of as many sequences.
        """
        rows = [counts["steps_B"], counts["full_B"], *(own for _, own in counts["read"])]
        batch = {len(own) for own in rows if own}
        numbers = [one for own in rows for row in own for one in (row if isinstance(row, list) else [row])]
        if len(batch) > 1 or not all(type(one) is int and one >= 0 for one in numbers):
            raise ValueError(
                f"the counts of what was read are {counts}, and should be whole numbers of at least 0, of as "
                "many sequences each: the file was changed, or another program wrote it."
            )
        self.steps_B, self.full_B = list(counts["steps_B"]), list(counts["full_B"])
        self.read = {
            idx: torch.tensor(own, dtype=torch.int64, device=devices[idx]).view(-1, 2)
            for idx, own in counts["read"]
        }
