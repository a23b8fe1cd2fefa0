"""Clusters vectors by k-means, the same on every run."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

STARTS, MOST_STEPS = 10, 300


@dataclass(frozen=True, eq=False)
class Clusters:
    """A partition of vectors.

    Args:
        labels_N: cluster of each vector.
        centroids_KE: mean of each cluster's vectors, float64.
        inertia: sum over vectors of the squared distance to their centroid.
    """

    labels_N: Int[Tensor, " N"]
    centroids_KE: Float[Tensor, "K E"]
    inertia: float


def kmeans(vectors_NE: Float[Tensor, "N E"], count: int, *, seed: int = 0, starts: int = STARTS) -> Clusters:
    """Find `count` clusters of small `sum_n ||x_n - c_(label n)||^2`, none empty.

    Lloyd's steps from k-means++ draws; the best of `starts` runs. A cluster that runs empty takes the vector
    that is farthest from its centroid. Computed in float64 on the CPU, so that devices agree. Clusters are
    numbered by their first vector.

    Args:
        count: clusters, at most as many as there are vectors.
        seed: of the draws.
        starts: runs from other draws.

    Raises:
        ValueError: more clusters than vectors, none, or a vector that is not finite.
    """
    vectors_NE = vectors_NE.detach().cpu().double()
    if not 1 <= count <= len(vectors_NE):
        raise ValueError(f"{len(vectors_NE)} vectors make 1 to {len(vectors_NE)} clusters, got {count}.")
    if not bool(vectors_NE.isfinite().all()):
        raise ValueError("vectors to cluster are not finite: look at what embeds the segments.")
    draw = torch.Generator().manual_seed(seed)
    runs = [_lloyd(vectors_NE, _spread(vectors_NE, count, draw)) for _ in range(starts)]
    best = min(runs, key=lambda run: run.inertia)
    order = list(dict.fromkeys(best.labels_N.tolist()))
    number_K = torch.empty(count, dtype=torch.int64)
    number_K[torch.tensor(order)] = torch.arange(count)
    return Clusters(number_K[best.labels_N], best.centroids_KE[order], best.inertia)


def _squared(vectors_NE: Tensor, centroids_KE: Tensor) -> Tensor:
    """Squared distances `[N, K]`."""
    exactly = "donot_use_mm_for_euclid_dist"
    return torch.cdist(vectors_NE, centroids_KE, compute_mode=exactly).square()


def _spread(vectors_NE: Tensor, count: int, draw: torch.Generator) -> Tensor:
    """First centroids by k-means++: each a vector, drawn by its squared distance to those before."""
    chosen = [int(torch.randint(len(vectors_NE), (), generator=draw))]
    while len(chosen) < count:
        weight_N = _squared(vectors_NE, vectors_NE[chosen]).amin(1)
        weight_N[chosen] = 0.0
        if not bool((weight_N > 0).any()):  # all others equal a centroid
            weight_N = torch.ones_like(weight_N)
            weight_N[chosen] = 0.0
        chosen.append(int(torch.multinomial(weight_N, 1, generator=draw)))
    return vectors_NE[chosen]


def _lloyd(vectors_NE: Tensor, centroids_KE: Tensor) -> Clusters:
    """Assign and average in turn until nothing changes."""
    count, labels_N = len(centroids_KE), None
    for _ in range(MOST_STEPS):
        distance_NK = _squared(vectors_NE, centroids_KE)
        new_N = _none_empty(distance_NK)
        if labels_N is not None and torch.equal(new_N, labels_N):
            break
        labels_N = new_N
        centroids_KE = torch.stack([vectors_NE[labels_N == own].mean(0) for own in range(count)])
    assert labels_N is not None
    inertia = float((vectors_NE - centroids_KE[labels_N]).square().sum())
    return Clusters(labels_N, centroids_KE, inertia)


def _none_empty(distance_NK: Tensor) -> Tensor:
    """The nearest centroid of each vector; an empty cluster takes the farthest vector of one that can spare
    it."""
    labels_N = distance_NK.argmin(1)
    own_N = distance_NK.gather(1, labels_N[:, None])[:, 0].clone()
    for cluster in range(distance_NK.shape[1]):
        counts_K = labels_N.bincount(minlength=distance_NK.shape[1])
        if counts_K[cluster]:
            continue
        farthest = int(own_N.masked_fill(counts_K[labels_N] == 1, -1.0).argmax())
        labels_N[farthest], own_N[farthest] = cluster, -1.0
    return labels_N
