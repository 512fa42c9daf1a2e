"""The plans of the GPU report: the most useful answers come first. Each part has processes with time limits.

This file imports neither PyTorch nor the package, so that a plan can be printed anywhere.
"""

from typing import NamedTuple

CONFIGS = ("configs/350M/roformer_coca.yml", "configs/cluster/gpu1.yml")
MODEL = " ".join(CONFIGS)
TRAINING = ("train.py", "megatron_coca/commands/train.py", *CONFIGS)
"""Files that a process of tools/gpu/ranks.py runs and reads."""
ONE = "train_batch_size=null gradient_accumulation_steps=1 data_types=null"
STEP = f"tools/bench_train.py {MODEL} {ONE} --compile --rounds 30 --output FILE"
RANKS = "tools/gpu/ranks.py --folder FOLDER --output FILE"
COMPUTES = ("torch", "triton", "pydantic", "yaml", "opt_einsum")
"""Packages that a part needs if it computes without DeepSpeed."""
TRAINS = (*COMPUTES, "deepspeed")


class Run(NamedTuple):
    """One process of a part.

    Attributes:
        command: arguments for Python. FILE stands for the file of its results, FOLDER for its scratch folder.
        seconds: the time limit.
        reads: files that the command names only indirectly. A finished run is repeated if the content of its script,
            of these files, or of a file that they import changes.
        needs: packages that must be installed.
    """

    command: str
    seconds: int
    reads: tuple[str, ...] = ()
    needs: tuple[str, ...] = COMPUTES


class PlanPart(NamedTuple):
    """A question, and the runs that answer it, by name."""

    title: str
    runs: dict[str, Run]

    @property
    def seconds(self) -> int:
        """The sum of the limits."""
        return sum(run.seconds for run in self.runs.values())


def _speed(arguments: str, seconds: int) -> Run:
    return Run(f"tools/gpu/speed.py --output FILE {arguments}", seconds, reads=CONFIGS[:1])


def _step(model: str, micro: int, seconds: int, keys: str = "") -> Run:
    needs = (*TRAINS, "transformers") if "--peer" in model else TRAINS
    command = f"{STEP} --seconds {seconds // 3} train_micro_batch_size_per_gpu={micro} {keys} {model}"
    return Run(" ".join(command.split()), seconds, needs=needs)


MODELS = {
    "roformer": ("--methods rotary", 65, 50),
    "coca": ("--methods coca", 55, 50),
    "llama": ("--methods --peer llama", 70, 60),
    "gpt_neox": ("--methods --peer transformers", 70, 60),
}
"""Model -> options of bench_train.py, and the limits with micro-batches of 16 and 64 samples of 512 tokens."""

BOTH_ENGINES = "--methods coca --engines deepspeed native graphs"

ONE_GPU: dict[str, PlanPart] = {
    "smoke": PlanPart(
        "Does every kernel run, forward and backward, in bfloat16?",
        {"kernels": Run("tools/gpu/smoke.py --output FILE", 120)},
    ),
    "parity": PlanPart(
        "Are the loss and the gradients of all default paths those of the CPU?",
        {
            "eager": Run("tools/gpu/parity.py --output FILE", 80),
            "compiled": Run("tools/gpu/parity.py --compile --output FILE", 100),
        },
    ),
    "step": PlanPart(
        "How fast is a training step of the 350M models, beside transformers' classes of the same size?",
        {
            **{f"{name}_16": _step(model, 16, small) for name, (model, small, _) in MODELS.items()},
            **{f"{name}_64": _step(model, 64, large) for name, (model, _, large) in MODELS.items()},
            "engines_16": _step(BOTH_ENGINES, 16, 60),
        },
    ),
    "attention": PlanPart(
        "How fast is attention from 512 to 32,768 tokens, and which backends should `auto` choose?",
        {
            "methods": _speed("--kind 'layer forward+backward' --lengths 512 2048 8192", 50),
            "long": _speed("--kind 'layer forward+backward' --lengths 32768 --rounds 3", 40),
            "backends": _speed("--backends --lengths 512 2048 8192", 100),  # compiles for 50 seconds
            "packed": _speed("--packed --lengths 512 2048 8192 32768", 50),
        },
    ),
    "inference": PlanPart(
        "How fast is decoding, and how much memory does the whole model take?",
        {
            "decode": _speed("--kind decode --lengths 512 4096 32768 --methods rotary coca rerope", 120),
            "windows": _speed("--kind 'model forward' --lengths 512 8192 --methods rotary coca rerope", 60),
            "memory": _speed("--kind 'model forward+backward' --lengths 32768 --methods rotary coca --rounds 1", 60),
        },
    ),
    "resume": PlanPart(
        "Does a killed run resume with the same losses, bit for bit?",
        {"kill": Run(f"{RANKS} --check resume --keys num_layers=6", 180, reads=TRAINING, needs=TRAINS)},
    ),
    "tests": PlanPart(
        "Do the GPU tests pass?",
        {
            "pytest": Run(
                "-m pytest -m gpu tests/gpu -n 8 --dist worksteal -vv --tb short --color no --junitxml FILE",
                240,
                reads=("tests/gpu", "tests/conftest.py"),
                needs=(*TRAINS, "pytest", "xdist", "pytest_timeout"),
            )
        },
    ),
}
"""The plan for one GPU, with limits of 29 minutes in total."""


LONGER = "seq_length=2048 max_position_embeddings=2048"
CHANGED_TESTS = " ".join(
    f"tests/gpu/test_{name}_cuda.py" for name in ("passes", "decoding", "merge", "head", "operands")
)
OTHER_TESTS = " ".join(f"tests/gpu/test_{name}_cuda.py" for name in ("triton", "attention", "lengths"))
"""The files of the GPU tests. Those in `CHANGED_TESTS` run first: they failed on a GPU and were then changed, or they
were added since."""

FIRST: dict[str, PlanPart] = {
    "step": PlanPart(
        "How fast is a training step of the 350M models, beside transformers' LLaMA of the same size?",
        {
            "together_16": _step("--methods rotary coca --peer llama", 16, 60),
            "profile": Run(f"tools/gpu/profile_step.py {MODEL} {ONE} --output FILE", 40, needs=TRAINS),
            "together_64": _step("--methods coca --peer llama", 64, 40),
            "coca_2048": _step("--methods coca", 16, 35, LONGER),
            "gpu1": Run(
                f"tools/bench_train.py {MODEL} --compile --rounds 8 --output FILE --seconds 15 {BOTH_ENGINES}",
                60,
                needs=TRAINS,
            ),
        },
    ),
    "attention": PlanPart(
        "How fast is attention from 2,048 to 32,768 tokens, and which backends should `auto` choose?",
        {
            "backends": _speed("--backends --lengths 2048 8192 32768 --rounds 5 --methods coca rerope pope", 55),
            "biases": _speed("--backends --lengths 2048 8192 32768 --rounds 5 --methods alibi kerple_log", 45),
            "packed": _speed("--packed --lengths 2048 8192 --rounds 5", 25),
        },
    ),
    "decoding": PlanPart(
        "How fast is a decoded token in a CUDA graph, beside a growing cache?",
        {"graphs": _speed("--graphs --lengths 512 8192 --rounds 5 --methods rotary coca rerope", 20)},
    ),
    "blocks": PlanPart(
        "Which block sizes are the fastest in the backward pass?",
        {"sweep": Run("tools/gpu/sweep.py --output FILE --lengths 8192 --rounds 5", 40)},
    ),
    "tests": PlanPart(
        "Do the GPU tests pass?",
        {
            "pytest": Run(
                f"-m pytest -m gpu {CHANGED_TESTS} {OTHER_TESTS} -n 8 --dist load --maxschedchunk 1 -vv --tb short "
                "--color no --junitxml FILE",
                120,
                reads=("tests/gpu", "tests/conftest.py"),
                needs=(*TRAINS, "pytest", "xdist", "pytest_timeout"),
            )
        },
    ),
}
"""The plan of one call for one GPU: the most important measurements, in at most nine minutes. Models take turns, so
that both sides of a ratio come from the same run.
"""


def _ranks(check: str, seconds: int) -> Run:
    return Run(f"{RANKS} --check {check}", seconds, reads=TRAINING, needs=TRAINS)


EIGHT_GPUS: dict[str, PlanPart] = {
    "collectives": PlanPart("Do NCCL's collectives return the right values?", {"nccl": _ranks("collectives", 60)}),
    "speed": PlanPart("How many tokens per second, with ZeRO 1 and overlap?", {"zero1": _ranks("speed", 180)}),
    "wait": PlanPart(
        "Are losses the same, bit for bit, if only a stream waits for the reductions (`reduction_wait`)?",
        {"stream": _ranks("wait", 240)},
    ),
    "elastic": PlanPart("Does a checkpoint of 8 ranks resume on 4?", {"four": _ranks("elastic", 180)}),
    "one_gpu": PlanPart("Are the losses those of one GPU?", {"one": _ranks("one_gpu", 240)}),
}
"""The plan for eight GPUs, with limits of 15 minutes in total. Every run trains the same small number of steps on the
built-in corpus.
"""

STAND_IN = {
    "tools/gpu/smoke.py": "--without-values",
    "tools/gpu/parity.py": "--without-values --only rotary coca",
    "tools/gpu/speed.py": "--without-values --rounds 2",
    "tools/gpu/profile_step.py": "--without-values",
    "tools/gpu/sweep.py": "--without-values --candidates 2",
    "tools/bench_train.py": "--rounds 3",
    "tools/gpu/ranks.py": "--stand-in --keys num_layers=2 hidden_size=256 num_attention_heads=4 torch_compile=false",
    "-m": "--collect-only",
}
"""Scripts -> options that are added on the stand-in device (tests/pretend). Kernels compute nothing there, so no
values are compared and pytest only collects the tests. The other options save time.
"""

PLANS = {1: ONE_GPU, 8: EIGHT_GPUS}
"""Number of GPUs -> the whole plan. `FIRST` is a shorter plan for one GPU."""
