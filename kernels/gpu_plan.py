"""Lists the checks that need a GPU, in the order in which the first ten minutes tell most.

First the installed packages, each op of inference against its reference, `generate` against the plain path
and a masked full cache, an 8B-shaped model at 32K tokens in inference and in training; then gated attention's
cases, whose kernels take minutes to compile, the other tests, the published ratios, the timed ops, 128K
tokens, the sanitizer; and last, for as long as there is time, a larger reference model. `retain.kernels.gpu`
runs them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One step of the plan.

    In commands `{python}` is the interpreter, `{folder}` a folder of the step's own, `{record}` the file in
    which its tool leaves a JSON, `{gpu_tests}` the test files that hold tests for a GPU.

    Args:
        name: of the step and of its files.
        about: what it tells, in one line.
        seconds: that it may take.
        command: on a GPU.
        tiny: what a CPU can do of it in seconds, with `--dry-run`; None: nothing.
        gpu: whether it needs a CUDA device.
        needs: modules that must be there.
        program: that must be on the path.
        after: a step that must have passed.
        goes_on: whether the same command goes on where it was ended: its limit is no failure.
    """

    name: str
    about: str
    seconds: int
    command: str
    tiny: str | None = None
    gpu: bool = True
    needs: tuple[str, ...] = ()
    program: str | None = None
    after: str | None = None
    goes_on: bool = False


OPS = ("ragged_attention", "compact", "attention_stats", "value_norm", "gated_attention")
PYTEST = "{python} -m pytest --all -q -p no:cacheprovider -W default"
SPEED = "{python} -m retain.eval.speed --what"
LONG = f"{SPEED} long --output {{record}}"
TRAINING = "{python} -m retain.train.speed --output {record}"
# Sizes at which a CPU takes seconds.
SHAPE = "--layers 2 --width 32 --heads 4 --kv-heads 2 --intermediate 48 --threads 1"
LIVES = f"{SHAPE} --dtype float32 --device cpu --rounds 2 --warmup 0 --steps 2"
TINY_LONG = f"{LONG} {LIVES} --tokens 200"
GENERATE = "tests/hf/test_kernels.py"


def _check(op: str) -> Step:
    """An op's cases. On an H200 those of gated attention took over 190 s, most of it to compile."""
    return Step(
        f"ops-{op}",
        f"{op} on every named case against its reference",
        480,
        f"{{python}} -m retain.kernels.bench --check --device cuda --op {op}",
        f"{{python}} -m retain.kernels.bench --check --device cpu --op {op}",
    )


STEPS = (
    Step(
        "environment",
        "what is installed, and which device",
        120,
        "{python} -m retain.kernels.gpu --look {record}",
    ),
    *(_check(op) for op in OPS[:-1]),
    Step(
        "generate",
        "`generate` on the kernels against the plain path, and against a full cache under a mask",
        300,
        f"{PYTEST} -m gpu {GENERATE}",
        f"{PYTEST} {GENERATE}::test_both_paths_say_what_the_oracle_says",
        needs=("pytest",),
    ),
    Step(
        "long-32k",
        "8B-shaped, 32K tokens: prefill, decoding, memory; CriticalKV's published time to first token",
        360,
        f"{LONG} --tokens 32768 --policies criticalkv,snapkv,adakv,fused",
        f"{TINY_LONG} --policies criticalkv,snapkv,adakv,fused,lava --keep-ratio 0.5",
    ),
    Step(
        "train-32k",
        "8B-shaped, rows of 32K tokens: training throughput, and peak memory beside the plan",
        300,
        f"{TRAINING} --shape 8b --device cuda",
        f"{TRAINING} {SHAPE} --tokens 160 --pairs 2 --warmup 0",
    ),
    _check(OPS[-1]),
    Step(
        "tests",
        "every other test that needs a GPU",
        600,
        f"{PYTEST} -m gpu {{gpu_tests}}",
        needs=("pytest",),
    ),
    Step(
        "long-32k-batch",
        "four prompts of 32K tokens, 40 % kept: SnapKV's published speed of decoding",
        420,
        f"{LONG} --tokens 32768 --batch 4 --keep-ratio 0.4 --policies snapkv",
    ),
    *(
        Step(
            f"bench-{op}",
            f"{op} beside its alternatives and the machine's own copy and matmul rates",
            360,
            f"{{python}} -m retain.kernels.bench --device cuda --op {op} --out {{folder}}/{op}.md",
        )
        for op in OPS
    ),
    Step(
        "decode",
        "attention over ragged rows beside dense rows; appending, compacting",
        240,
        f"{SPEED} decode --device cuda --dtype bfloat16 --seen 32768 --output {{record}}",
        f"{SPEED} decode --seen 256 --heads 4 --kv-heads 2 --width 16 --evicted 4 --rounds 2 --threads 1 "
        "--output {record}",
    ),
    Step(
        "eviction",
        "evicting every m tokens of decoding beside not evicting",
        300,
        f"{SPEED} eviction --device cuda --dtype bfloat16 --output {{record}}",
    ),
    Step(
        "long-128k-1024",
        "8B-shaped, 128K tokens, 1,024 entries a head: LAVa's published speed of decoding",
        540,
        f"{LONG} --tokens 131072 --keep-ratio 0.0078125 --policies lava --rounds 2",
    ),
    Step(
        "long-128k",
        "8B-shaped, 128K tokens, 20 % kept: prefill, decoding, memory",
        560,
        f"{LONG} --tokens 131072 --policies fused,snapkv --rounds 2",
    ),
    Step(
        "train-128k",
        "8B-shaped, rows of 128K tokens: training throughput, and peak memory beside the plan",
        540,
        f"{TRAINING} --shape 8b --device cuda --tokens 131072 --pairs 2",
    ),
    Step(
        "distill",
        "gates of a reference model, trained on the device from beginning to end",
        300,
        "{python} -m retain.train.distill --config configs/distill/reference.yaml training.steps=60 "
        "data.documents=480 output={folder}/gates overwrite=true",
        "{python} -m retain.train.distill --config configs/distill/reference.yaml --plan plan.tflops=1",
        needs=("accelerate",),
    ),
    Step(
        "peers",
        "the same methods in the field's main library, which must be installed beside torch",
        420,
        f"{SPEED} peers --peer-python {{python}} --device cuda --dtype bfloat16 "
        "--layers 8 --width 4096 --heads 32 --kv-heads 8 --intermediate 14336 --tokens 16384 "
        "--keep-ratios 0.2 --batches 1 --output {record}",
        needs=("kvpress",),
    ),
    Step(
        "builds",
        "every kernel compiled for sm_80 and sm_90 by the Triton that is installed",
        600,
        "{python} -m retain.kernels.build",
        gpu=False,
        needs=("triton",),
    ),
    *(
        Step(
            f"sanitize-{tool}",
            f"compute-sanitizer's {tool} over every named case of every op",
            600,
            f"compute-sanitizer --error-exitcode 1 --tool {tool} {{python}} -m retain.kernels.bench --check "
            "--device cuda",
            program="compute-sanitizer",
        )
        for tool in ("memcheck", "racecheck")
    ),
    Step(
        "reference-large",
        "a larger reference model, for as long as there is time",
        7200,
        "{python} -m retain.reference.train --size large --seed 0 --device cuda --loaders 8 "
        "--output {folder}/model",
        "{python} -m retain.reference.train --size tiny --seed 0 --output {folder}/model",
        goes_on=True,
    ),
    Step(
        "reference-large-scores",
        "how often that model answers right with its full cache",
        900,
        "{python} -m retain.reference.evaluate --model {folder}/../reference-large/model "
        "--context-tokens 4000 --device cuda --output {record}",
        after="reference-large",
    ),
)
