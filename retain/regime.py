"""Says when a cache evicts: after its first prompt, after everything that it reads, or every few tokens.

A name is one or two parts joined by `+`:

    prefill    once, when the first prompt has been read, all its chunks together
    chunked    after every read: every chunk of a prompt, every later turn
    decode     whenever `every` tokens or more have come since the last eviction (or since the first prompt)
"""

from dataclasses import dataclass

from retain.process.registry import check_choice

NAMES = ("prefill", "chunked", "decode", "prefill+decode", "chunked+decode")


@dataclass(frozen=True)
class Regime:
    """When to evict.

    Args:
        name: one of `NAMES`.
        every: tokens between evictions, for `decode`.

    Examples:
        >>> Regime("prefill+decode").due(read=False, prompt_ends=False, tokens=32)
        True
    """

    name: str = "prefill"
    every: int = 32

    def __post_init__(self) -> None:
        check_choice("regime", self.name, NAMES)
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"every is {self.every!r}, and must be a whole number of tokens, at least 1.")

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.name.split("+"))

    @property
    def again(self) -> bool:
        """True if it evicts after the first prompt too."""
        return self.name != "prefill"

    @property
    def evicts_prompt(self) -> bool:
        """True if it evicts from the first prompt."""
        return self.parts != ("decode",)

    def due(self, *, read: bool, prompt_ends: bool, tokens: int) -> bool:
        """True if it evicts after a forward.

        Args:
            read: it was part of a prompt: the first forward, or more than one new token.
            prompt_ends: the first prompt ended with it.
            tokens: that have come since the last eviction, or since the first prompt ended; 0 before that.
        """
        parts = self.parts
        return (
            ("prefill" in parts and prompt_ends)
            or ("chunked" in parts and read)
            or ("decode" in parts and tokens >= self.every)
        )
