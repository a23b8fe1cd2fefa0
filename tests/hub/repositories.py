"""Holds repositories of the hub of the tests in memory: blobs, commits, branches, tags."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

# Tokens -> who they are, and whether they may write.
TOKENS = {"hf_owner": ("owner", True), "hf_reader": ("owner", False), "hf_other": ("other", True)}


def git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass(frozen=True)
class Blob:
    """A file's content with its names."""

    data: bytes
    path: str

    @cached_property
    def oid(self) -> str:
        return git_id(self.data)

    def entry(self) -> dict[str, Any]:
        """As the listing of a tree has it."""
        return {"type": "file", "path": self.path, "oid": self.oid, "size": len(self.data)}


@dataclass(frozen=True)
class Commit:
    sha: str
    title: str
    files: Mapping[str, Blob]
    parent: str | None
    date: str


@dataclass
class Repository:
    """Commits by sha, branches and tags by name."""

    kind: str
    name: str
    private: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        return self.name.partition("/")[0]

    def sha_of(self, revision: str) -> str | None:
        sha = self.branches.get(revision) or self.tags.get(revision) or revision
        return sha if sha in self.commits else None

    def add(self, branch: str, files: Mapping[str, Blob], title: str) -> str:
        """Commits on a branch: the files given beside those that are there."""
        parent = self.branches.get(branch)
        kept = {**(self.commits[parent].files if parent else {}), **files}
        number = len(self.commits)
        content = json.dumps([parent, title, number, {path: blob.oid for path, blob in kept.items()}])
        sha = hashlib.sha1(f"{self.kind}/{self.name}{content}".encode()).hexdigest()
        date = f"2026-01-01T00:{number // 60:02}:{number % 60:02}.000Z"
        self.commits[sha] = Commit(sha, title, kept, parent, date)
        self.branches[branch] = sha
        return sha
