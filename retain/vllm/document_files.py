"""Files of shared documents: which of a folder can be served, what they hold, and how new ones are written.

A file is one of `retain.Cache` (`retain.cache.prompt_file`), made offline with pages of the engine's block
size, or by the engine itself. At the start only its header and token ids are looked at; it is read and
checked whole when the first request begins with it. One that does not fit is refused, and requests are served
as if it were not there.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from retain import config
from retain.cache.file_format import named_rule
from retain.cache.prompt_file import Claim, HeldPrompt, Sizes, peek_prompt, read_prompt
from retain.vllm.documents import Ask, Document, Documents, Save, Terms, digest_of
from retain.vllm.settings import Cut, Options, Rules

ENDING = ".safetensors"
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# What a policy is called, and where it is from, decides nothing.
NAMES = ("name", "paper", "variants", "regime")


@dataclass(frozen=True)
class Identity(KVConnectorHandshakeMetadata):
    """Who a worker's model is, as it tells the scheduler at the start.

    Args:
        fingerprint: of the model; None where it cannot be told.
        gates: sha256 of the gates' artifact; None without.
        layers: that evict.
        eight_bits: whether the engine's cache is in float8.
    """

    fingerprint: dict[str, Any] | None
    gates: str | None
    layers: tuple[Sizes, ...]
    eight_bits: bool = False


class DocumentFiles:
    """The folder of an engine's documents.

    Args:
        folder: where they are; None: there is none.
        rules: of the engine.
        identities: of the workers.
    """

    def __init__(self, folder: str | None, rules: Rules, identities: list[Identity]):
        self.folder = None if folder is None else Path(folder)
        self.rules, self.identities = rules, identities
        if self.folder is not None and not self.folder.is_dir():
            raise ValueError(
                f"documents={folder!r} is no folder: make it, or leave documents out of the settings."
            )

    def problem(self) -> str | None:
        """Why files cannot be read or written here; None: they can."""
        if self.folder is None:
            return "the engine was started without a folder: add documents=FOLDER to its settings"
        if len(self.identities) != 1:
            return f"the KV heads are spread over {len(self.identities)} workers (tensor parallelism)"
        if self.identities[0].fingerprint is None:
            return "the engine's model cannot be told from others (its weights are quantised, or not loaded)"
        if self.identities[0].eight_bits:
            return "the engine's cache is in 8 bits, and a file has entries as the model made them"
        return None

    def path_of(self, name: str, known: Document | None) -> Path | None:
        """Path of a new file; None where it holds the document already.

        Args:
            name: of the file.
            known: the document, if it was made or found before.

        Raises:
            ValueError: it cannot be written, or holds something else.
        """
        if problem := self.problem():
            raise ValueError(f"document {name!r} cannot be saved: {problem}.")
        assert self.folder is not None
        if not PLAIN_NAME.fullmatch(name):
            raise ValueError(
                f"document {name!r} cannot be saved: a plain file name of letters, digits, '.', '_' and '-' "
                "is wanted."
            )
        path = self.folder / (name if name.endswith(ENDING) else name + ENDING)
        if known is not None and known.path == path:
            return None
        if path.exists():
            raise ValueError(f"document {name!r} cannot be saved: there is such a file; take another name.")
        return path

    def scan(self, documents: Documents) -> Iterator[str]:
        """Make the folder's files known.

        Yields:
            why a file is refused.
        """
        paths = [] if self.folder is None else sorted(self.folder.glob(f"*{ENDING}"))
        known = {document.path for document in documents.known.values()}
        for path in paths:
            if path in known:
                continue
            try:
                if problem := self.problem():
                    raise ValueError(f"{path} cannot be served: {problem}.")
                claim = peek_prompt(path)
                cut = self._cut(claim, path)
            except ValueError as error:
                yield str(error)
                continue
            digest = digest_of(claim.tokens_T[: cut.length].numpy())
            key = (Terms(claim.budget), cut.length, digest)
            if key not in documents.known:
                documents.add(Document(key, cut, documents.new_serial(), path=path))

    def _cut(self, claim: Claim, path: Path) -> Cut:
        """How much of a file's document stays.

        Raises:
            ValueError: it was made otherwise than this engine makes documents.
        """
        here = json.loads(json.dumps(config.to_mapping(self.rules.policy)))
        names = [name for name in sorted(here | dict(claim.policy)) if name not in NAMES]
        differ = [name for name in names if here.get(name) != claim.policy.get(name)]
        gates = self.identities[0].gates
        wrong = {
            f"policy {claim.policy.get('name')!r} ({', '.join(differ)} differ)": bool(differ),
            f"gates {str(claim.gates)[:12]} (here {str(gates)[:12]}, sha256)": claim.gates != gates,
            f"page {claim.budget.page} (here {self.rules.page})": claim.budget.page != self.rules.page,
            "a budget in bytes": claim.budget.bytes is not None,
        }
        if found := [text for text, holds in wrong.items() if holds]:
            raise ValueError(
                f"{path} was made with {'; '.join(found)}: make it with the engine's policy, gates and page."
            )
        cut = self.rules.cut(claim.length, claim.budget)
        if not cut.evicts or not cut.kept:
            raise ValueError(
                f"{path} holds a prompt that nothing goes of here: leave it to the prefix cache."
            )
        return Cut(cut.full * self.rules.page, cut.full, cut.kept)

    def read(self, document: Document) -> HeldPrompt:
        """The entries of a document.

        Raises:
            ValueError: the file is corrupt, of another model, or not what it claimed to be.
            OSError: it cannot be read.
        """
        path, identity = document.path, self.identities[0]
        assert path is not None and identity.fingerprint is not None
        claim, held = read_prompt(path, identity.fingerprint, identity.layers)
        cut = self._cut(claim, path)
        terms, length, digest = document.key
        tokens = claim.tokens_T[:length].numpy()
        if cut != document.cut or claim.budget != terms.budget or digest_of(tokens) != digest:
            raise ValueError(f"{path} is another file than it was: start the engine again to serve it.")
        held, page = held.below(length), self.rules.page
        if bool((held.counts_LH % page).any()) or len(held.positions_N) != cut.kept * page * sum(
            self.rules.heads_L
        ):
            raise ValueError(
                f"{path} holds {len(held.positions_N)} entries, and {cut.kept} pages of {page} a head are "
                "wanted: make it with retain.Cache(..., page=...) of this version."
            )
        return held

    def save(self, ask: Ask, options: Options) -> Save:
        """What a worker needs to write the file of a document.

        Args:
            ask: of the request that makes it.
            options: of that request.
        """
        assert options.budget is not None and ask.path is not None
        blocks = None
        if ask.document is not None and ask.document.blocks is not None:
            blocks = tuple(block.block_id for block in ask.document.blocks)
            ask.document.path = ask.document.path or ask.path
        ids = torch.from_numpy(ask.tokens_T[: ask.cut.length].copy())
        rule = named_rule(self.rules.policy, options.budget, self.identities[0].gates)
        return Save(ask.path, ids, rule, options.seed, blocks)
