"""Whether a device computes in half precision is read off its processor's flags."""

from io import StringIO
from pathlib import Path

import pytest
import torch

from retain.process import provenance
from retain.process.half_precision import multiplies

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("flags", "dtype", "answer"),
    [
        ("flags : fpu avx512_bf16 sse", torch.bfloat16, True),
        ("flags : fpu avx512_bf16 sse", torch.float16, False),
        ("flags : fpu amx_fp16", torch.float16, True),
        ("flags : fpu avx512_bf16x", torch.bfloat16, False),
        ("", torch.float32, True),
        (None, torch.bfloat16, False),  # a system that does not say
    ],
)
def test_a_processor_says_what_it_multiplies(flags, dtype, answer, monkeypatch) -> None:
    def read(path: Path, **how: str) -> str:
        if flags is None:
            raise OSError
        return flags

    monkeypatch.setattr(Path, "read_text", read)
    assert multiplies(CPU, dtype) is answer and multiplies(CUDA, dtype) is True


def test_a_manifest_names_the_processor(monkeypatch) -> None:
    text = "processor : 0\nmodel name\t: A: fast one\n\nprocessor : 1\nmodel name\t: A: fast one\n"
    monkeypatch.setattr(provenance, "open", lambda path, encoding: StringIO(text), raising=False)
    assert provenance.environment("cpu", 1)["processor"] == "A: fast one"
