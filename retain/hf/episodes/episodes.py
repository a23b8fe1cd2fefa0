"""Holds a cache for each topic of a conversation, and answers a question from the nearest one.

EpiCache: Episodic KV Cache Management for Long Conversational Question Answering, arXiv 2509.17396 (in its
fourth version: for Long-Term Conversation on Resource-Constrained Environments), and its released code.
A history is split into segments, whose embeddings are clustered: an *episode* is a cluster. The segments
nearest to its centroid are read as a patched prompt behind every block of the history, and what they attend
to is what the episode's cache keeps of all of it. A question goes to the episode of the nearest centroid.

Where we differ. (Of the paper the abstract and a review were read, of the release its code.) The embedding is
by default the model's own, the mean of its input embeddings: the least accurate of the three that the release
offers, and the only one that needs no second model. Its other two are sentence encoders; pass one as `embed`.
The paper's patched prompt is the medoid alone, the release's an instruction, the end of the chat template and
the 4 (in its scripts 8) nearest segments: `instruction_ids` and `medoids`. The release takes the dot product
of a question and each centroid, here it is the cosine. Budgets of layers by the deviation of their keys under
eviction are not built; `allocation` of the policy is what spreads a budget.

The paper's budget is that of each cache, the others being held off the device. `budget` says whether it is
that, or one that all caches share.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import normalize

from retain.hf.cache.batch_context import prompt_from, whole
from retain.hf.cache.cache import Cache
from retain.hf.episodes.kmeans import kmeans
from retain.hf.episodes.patched_prompt import prefill_patched
from retain.hf.model.decoder import base_model
from retain.presets import Policy
from retain.registry import lookup

# Token ids of texts -> one vector a text.
Embed = Callable[[list[list[int]]], Tensor]

BUDGETS = {
    "together": "all caches share it, so that each holds its part: nothing is held elsewhere",
    "each": "each cache holds all of it, as in the paper: the others count only where they are held",
}


@dataclass(frozen=True, eq=False)
class Episode:
    """One topic of a history.

    Args:
        segments: numbers of its segments, ascending.
        medoids: those whose tokens were the patched prompt, ascending.
        centroid_E: mean of the segments' embeddings, of length at most 1, float64.
        cache: of the whole history.
    """

    segments: tuple[int, ...]
    medoids: tuple[int, ...]
    centroid_E: Float[Tensor, " E"]
    cache: Cache


@dataclass(frozen=True, eq=False)
class Episodes:
    """A history's episodes. `read` makes them.

    Args:
        spans: `(start, stop)` of each segment, in tokens of the history.
        episodes: in the order of their first segments.
        embed: what embedded the segments, and embeds questions.
        tokens_per_head: as it was stated.
        budget: of `BUDGETS`, what that bounds.
    """

    spans: tuple[tuple[int, int], ...]
    episodes: tuple[Episode, ...]
    embed: Embed
    tokens_per_head: int
    budget: str

    @classmethod
    def read(
        cls,
        model: nn.Module,
        input_ids: Int[Tensor, "B T"],
        *,
        tokens_per_head: int,
        budget: str,
        num_episodes: int = 4,
        segments: int | Sequence[tuple[int, int]] = 128,
        medoids: int = 1,
        instruction_ids: Int[Tensor, "instructions S"] | None = None,
        embed: Embed | None = None,
        seed: int = 0,
        policy: str | Policy = "snapkv:patched",
        chunk_size: int | None = None,
        **settings: Any,
    ) -> "Episodes":
        """Read a history once for each episode.

        Args:
            model: attached.
            input_ids: the history, one sequence.
            tokens_per_head: entries of the history that a KV head holds, in the mean over a layer's heads.
            budget: `together`: in all caches, of which each gets `tokens_per_head // num_episodes`; `each`:
                in every cache, which is the paper's memory if the others are held elsewhere. They are not
                moved here.
            num_episodes: clusters; the paper's scripts have 4.
            segments: tokens of a segment; or spans `(start, stop)`, such as turns. The release takes 4
                utterances.
            medoids: segments nearest to a centroid, by cosine, that make its patched prompt, in order.
            instruction_ids: tokens read before them.
            embed: lists of token ids to a tensor `[N, E]`, for segments and questions; None:
                `mean_embedding(model)`.
            seed: of k-means.
            policy: whose score looks at a window of last queries, which here is the patched prompt.
            chunk_size: tokens of a block; None: the history is one block.
            **settings: of the policy, as `prefill_patched` takes them.

        Raises:
            ValueError: more episodes than segments, spans that are none, a budget of less than an entry a
                cache; or as `prefill_patched`.
        """
        lookup(budget, BUDGETS, what="what the budget of episodes bounds (budget=)")
        tokens_per_head = whole(tokens_per_head, "tokens_per_head", "entries of the history a head", 1)
        num_episodes = whole(num_episodes, "num_episodes", "clusters of segments", 1)
        medoids = whole(medoids, "medoids", "segments of a patched prompt", 1)
        own = tokens_per_head if budget == "each" else tokens_per_head // num_episodes
        if own < 1:
            raise ValueError(
                f"{tokens_per_head} entries a head in {num_episodes} caches together are less than one in "
                "each: state more, fewer episodes, or budget='each'."
            )
        input_ids = _one_sequence(model, input_ids, "a history")
        if instruction_ids is not None:
            instruction_ids = _one_sequence(model, instruction_ids, "an instruction")
        spans = spans_of(segments, input_ids.shape[1])
        if len(spans) < num_episodes:
            raise ValueError(
                f"the history has {len(spans)} segments, and num_episodes={num_episodes} clusters of them "
                "are wanted: take shorter segments, or fewer episodes."
            )
        embed = mean_embedding(model) if embed is None else embed
        vectors_NE = _vectors(embed, [input_ids[0, start:stop].tolist() for start, stop in spans])
        clusters = kmeans(vectors_NE, num_episodes, seed=seed)
        episodes = []
        for number, centroid_E in enumerate(clusters.centroids_KE):
            members = (clusters.labels_N == number).nonzero()[:, 0]
            nearest = (vectors_NE[members] @ centroid_E).argsort(descending=True, stable=True)[:medoids]
            chosen = sorted(members[nearest].tolist())
            parts = [input_ids[:, slice(*spans[segment])] for segment in chosen]
            if instruction_ids is not None:
                parts.insert(0, instruction_ids.to(input_ids.device))
            cache = prefill_patched(
                model,
                input_ids,
                torch.cat(parts, dim=1),
                tokens_per_head=own,
                policy=policy,
                chunk_size=chunk_size,
                **settings,
            )
            episodes.append(Episode(tuple(members.tolist()), tuple(chosen), centroid_E, cache))
        return cls(spans, tuple(episodes), embed, tokens_per_head, budget)

    def nearest(self, question_ids: Int[Tensor, "1 S"]) -> int:
        """Number of the episode whose centroid has the largest cosine to a question's embedding; the first of
        equals."""
        if question_ids.dim() != 2 or len(question_ids) != 1:
            raise ValueError(
                f"a question is one sequence [1, S], got shape {tuple(question_ids.shape)}: ask one by one."
            )
        question_E = _vectors(self.embed, [question_ids[0].tolist()])[0]
        centroids_KE = unit(torch.stack([episode.centroid_E for episode in self.episodes]))
        return int((centroids_KE @ question_E).argmax())

    def route(self, question_ids: Int[Tensor, "1 S"]) -> Cache:
        """A fork of the nearest episode's cache, for `generate` with the history's ids and the question's."""
        return self.episodes[self.nearest(question_ids)].cache.fork()

    def bytes_held(self) -> int:
        """Bytes of the keys and values held, over all caches."""
        return sum(episode.cache.bytes_held() for episode in self.episodes)

    def bytes_allocated(self) -> int:
        """Bytes of all storage behind them, over all caches."""
        return sum(episode.cache.bytes_allocated() for episode in self.episodes)

    def report(self) -> str:
        """A table of the episodes and their bytes, which says what the budget bounds."""
        lines = [
            f"{len(self.episodes)} episodes of {len(self.spans)} segments",
            f"budget {self.budget}, {self.tokens_per_head:,} entries a head: {BUDGETS[self.budget]}",
            f"{'episode':>9} {'segments':>9} {'patched prompt':>15} {'entries held':>13} {'bytes held':>12}",
        ]
        for number, episode in enumerate(self.episodes):
            total = episode.cache.report().total
            lines.append(
                f"{number:>9} {len(episode.segments):>9} {','.join(map(str, episode.medoids)):>15} "
                f"{total.entries_held:>13,} {total.bytes_held:>12,}"
            )
        entries = sum(episode.cache.entries_held for episode in self.episodes)
        full = self.episodes[0].cache.bytes_full()
        lines.append(f"{'all':>9} {len(self.spans):>9} {'':>15} {entries:>13,} {self.bytes_held():>12,}")
        lines.append(f"{'full':>9} {'':>9} {'':>15} {'':>13} {full:>12,}")
        return "\n".join(lines)


def spans_of(segments: int | Sequence[tuple[int, int]], total: int) -> tuple[tuple[int, int], ...]:
    """Spans of the segments of `total` tokens: equal ones but the last, or those given.

    Raises:
        ValueError: a span is empty, or outside.
    """
    if not isinstance(segments, Sequence):
        size = whole(segments, "segments", "tokens of a segment", 1)
        return tuple((start, min(start + size, total)) for start in range(0, total, size))
    if any(not isinstance(span, Sequence) or len(span) != 2 for span in segments):
        raise ValueError(f"segments are pairs (start, stop), or one number of tokens; got {segments!r}.")
    spans = tuple((int(start), int(stop)) for start, stop in segments)
    if not spans or any(not 0 <= start < stop <= total for start, stop in spans):
        raise ValueError(
            f"segments are spans (start, stop) with 0 <= start < stop <= {total}, the history's length, and "
            f"at least one; got {list(spans)}."
        )
    return spans


def _one_sequence(model: nn.Module, ids: Int[Tensor, "B T"], what: str) -> Int[Tensor, "1 T"]:
    """Token ids that are one sequence; a ValueError if they are none, or several."""
    ids, _ = prompt_from(ids, None, base_model(model).config.get_text_config().vocab_size)
    if len(ids) != 1:
        raise ValueError(f"{what} is one sequence, got {len(ids)}: read them one by one.")
    return ids


def _vectors(embed: Embed, texts: list[list[int]]) -> Float[Tensor, "N E"]:
    """Embeddings at length 1; a ValueError unless there is one for each text."""
    vectors_NE: Any = embed(texts)
    if not isinstance(vectors_NE, Tensor) or vectors_NE.dim() != 2 or len(vectors_NE) != len(texts):
        got = tuple(vectors_NE.shape) if isinstance(vectors_NE, Tensor) else type(vectors_NE).__name__
        raise ValueError(f"embed gave {got} for {len(texts)} texts: wanted a tensor [{len(texts)}, E].")
    return unit(vectors_NE)


def unit(vectors_NE: Float[Tensor, "N E"]) -> Float[Tensor, "N E"]:
    """The vectors at length 1 (but for zeros), in float64 on the CPU."""
    return normalize(vectors_NE.detach().cpu().double(), dim=-1)


def mean_embedding(model: nn.Module) -> Embed:
    """Embeds a text by the mean of the model's input embeddings of its tokens: which words it has, and
    neither their order nor what they mean together."""

    @torch.no_grad()
    def embed(texts: list[list[int]]) -> Tensor:
        table: Any = base_model(model).get_input_embeddings()
        device = table.weight.device
        return torch.stack([table(torch.tensor(ids, device=device)).cpu().double().mean(0) for ids in texts])

    return embed
