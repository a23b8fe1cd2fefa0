"""Two controls that bound what a learned score can be worth. Neither is a method.

`TokenIdentity` knows what a token is and nothing else: the mean target of its id, per layer and head, over
documents like those that gates are distilled on. A gate's gain over it comes from context. `oracle` knows the
future: the true risk under the question and the right answer, by the definition that gates are trained on
(`retain.future`). A gate's distance to it could still be learned (up to the score's own faults: the largest
attention is not the best score for counting words, say).

Both give a `Score` in units of risk and go through the policy pipeline in the gate's place, under the gate's
protection and budget (a comparison may measure them under others too).
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float32
from safetensors import safe_open
from torch import Tensor

from retain.evidence import Evidence
from retain.future import future_risk
from retain.gates.artifact import save_beside
from retain.hf.intercept.observe import observe
from retain.reference.documents import Document
from retain.scores import Score, masked_score


@dataclass(frozen=True)
class TokenIdentity:
    """Mean risk of every token id.

    Attributes:
        mean_LHV: Per layer, KV head and token id. An id that was met `n` times has `(sum + head mean) / (n +
            1)`: an id never met has the head's mean.
    """

    mean_LHV: Float32[Tensor, "L H V"]

    def score(self, evidence: Evidence) -> Score:
        """Looks the token ids of one layer's entries up.

        Raises:
            ValueError: If the evidence holds no token ids.
        """
        if evidence.token_ids_BT is None:
            raise ValueError(
                "The token-identity control needs token ids, and this evidence was made from embeddings."
            )
        ids_BT = evidence.token_ids_BT
        values_HBT = self.mean_LHV[evidence.layer_idx].to(ids_BT.device)[:, ids_BT]
        return masked_score(values_HBT.transpose(0, 1), evidence.valid_BT, "risk")

    def save(self, path: Path) -> None:
        """Writes the table beside `path`, then renames."""
        os.replace(save_beside(path, {"mean_LHV": self.mean_LHV.contiguous()}, {}), path)

    @classmethod
    def load(cls, path: Path) -> "TokenIdentity":
        """Reads a table back.

        Raises:
            SafetensorError, OSError: It is damaged, or there is none.
        """
        with safe_open(path, framework="pt") as file:
            return cls(file.get_tensor("mean_LHV"))


@torch.no_grad()
def fit_token_identity(model: Any, documents: Iterable[Document], *, horizon: int) -> TokenIdentity:
    """Averages each id's future risk over documents: the best guess of a risk that an id alone allows.

    Args:
        documents: Contexts with questions and answers appended.
        horizon: Distance, in entries, from which a document's own tokens count.

    Raises:
        ValueError: If there are no documents.
    """
    vocab = int(model.config.get_text_config().vocab_size)
    sums: dict[int, Tensor] = {}
    counts: dict[int, Tensor] = {}
    for document in documents:
        ids_T = torch.tensor(document.context_ids)
        ids = torch.tensor([[*document.context_ids, *document.appendix_ids]], device=model.device)
        for evidence in observe(model, ids):
            layer, shape = evidence.layer_idx, (evidence.num_heads, vocab)
            risk, reached = future_risk(evidence, document_tokens=len(ids_T), horizon=horizon)
            ids_HT = ids_T.expand(evidence.num_heads, -1)
            for table, values in ((sums, risk), (counts, reached)):
                own_HV = table.setdefault(layer, torch.zeros(shape, dtype=torch.float64))
                own_HV.scatter_add_(1, ids_HT, values[0].double().cpu())
    if not sums:
        raise ValueError(
            "The token-identity control was given no documents to be fitted on: control_documents >= 1."
        )
    means = []
    for layer in sorted(sums):
        head_mean_H1 = sums[layer].sum(-1, keepdim=True) / counts[layer].sum(-1, keepdim=True)
        means.append((sums[layer] + head_mean_H1) / (counts[layer] + 1))
    return TokenIdentity(torch.stack(means).float())


def oracle(teacher: Sequence[Evidence], document_tokens: int) -> list[Score]:
    """Returns the true future risk of the first entries of a sequence under the tokens that really follow.

    Args:
        teacher: Every layer over `[document; appendix]`, nothing evicted. The appendix is what is left of the
            question, and what generation reads of the right answer (`retain.eval.run.answers.read_back`): the
            queries that really come, and only they count.
        document_tokens: Entries that eviction will see.

    Returns:
        One score per layer, `[B, H, document_tokens]`, in units of risk. Where several questions are asked of
        one eviction, each is a future of its own, and the oracle's is `largest` of them all.
    """
    made = [future_risk(layer, document_tokens=document_tokens, sources=("appendix",)) for layer in teacher]
    return [Score(risk_BHT, "risk") for risk_BHT, _ in made]


def largest(futures: Sequence[Sequence[Score]]) -> list[Score]:
    """Returns the largest risk under several futures (a question's scores by layer) of the same entries:
    `max_k risk_k[b, h, i]`.

    Raises:
        ValueError: If there are none.
    """
    if not futures:
        raise ValueError("an oracle that is asked nothing knows no future: pass the scores of a question.")
    return [
        Score(torch.stack([own.values_BHT for own in layer]).amax(0), "risk")
        for layer in zip(*futures, strict=True)
    ]
