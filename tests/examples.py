"""How the tests run the documented commands, and a folder in which they run with small models.

The beginning of a command selects its row; the longest row that fits counts. A command without a row in either table
fails the tests.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from megatron_coca.checkpoints.exporting import export, export_neox
from megatron_coca.config import load_config
from megatron_coca.data import CorpusSource, Execution, Rules, SourceSpec, load_tokenizer, prepare
from megatron_coca.data.builtin import prepare_builtin
from tests.checkpoint_files import write_checkpoint, write_trained_adapters
from tests.documents import ROOT

WINDOWS = "--windows 64,128 --stride 64 --max-length 128 --num-documents 1"
RETRIEVAL = "--cases 1 --max-new-tokens 4"
CHECKPOINT_SUITE = "megatron-coca evaluate suite configs/evaluation/checkpoint.yml"
TWO = "save=runs/new distributed_backend=gloo --num_gpus 2"
SPLIT_SEQUENCE = "sequence_parallel_size=2 seq_length=128"
SPLIT_CONTEXT = "context_parallel_size=2 seq_length=128"
RECALL = "megatron-coca train configs/recall/model.yml pos_emb=coca"
QUICKSTART = "megatron-coca train configs/quickstart"
TUTORIAL = "data/tutorial/data.yml vocab_size=2048 train_iters=600 save=runs/tutorial"

RUN = {
    "megatron-coca train configs/350M/roformer_coca.yml": "save=runs/new",
    "megatron-coca train configs/350M/roformer_coca.yml model_parallel_size=2": TWO,
    "megatron-coca train configs/350M/roformer.yml configs/train/pope.yml": "save=runs/new",
    RECALL: "train_iters=4 checkpoint_factor=2 eval_interval=4 save=runs/recall/coca",
    "megatron-coca train configs/350M/roformer_coca.yml pipe_parallel_size=2": TWO,
    "megatron-coca train configs/350M/roformer_coca.yml seq_length=65536": f"{TWO} {SPLIT_SEQUENCE}",
    "megatron-coca train configs/350M/roformer_coca.yml context_parallel_size=4": f"{TWO} {SPLIT_CONTEXT}",
    QUICKSTART: "save=runs/new",
    f"{QUICKSTART}/roformer_coca.yml configs/train/stages.yml": "save=runs/new",
    f"{QUICKSTART}/roformer.yml configs/train/drope.yml": "train_iters=20 save=runs/new",
    f"{QUICKSTART}/roformer.yml {TUTORIAL}": "train_iters=4",
    f"{QUICKSTART}/roformer_coca.yml {TUTORIAL}": "train_iters=4",
    f"{QUICKSTART}/roformer_coca.yml {TUTORIAL}/coca --auto-resume": "train_iters=6",
    "megatron-coca train configs/finetune": "save=runs/new",
    "megatron-coca train configs/finetune/llama7b_coca.yml": "num_nodes=-1 save=runs/new",
    "megatron-coca train models/llama-7b": "train_iters=2 train_batch_size=2 seq_length=64 save=runs/new",
    "megatron-coca train models/llama-7b configs/finetune/lora.yml": "train_iters=5 train_batch_size=2 seq_length=64"
    " save=runs/new",
    "megatron-coca train adapters": "train_iters=2 train_batch_size=2 seq_length=64 save=runs/new",
    "megatron-coca estimate": "",
    "megatron-coca status": "",
    "python tools/gpu_report.py --dry-run": "",
    "megatron-coca generate": "--max-new-tokens 4",
    "megatron-coca prepare --builtin": "--output data/new",
    "megatron-coca prepare --input books": "--output data/new",
    "megatron-coca prepare --input books=books.jsonl.zst code=": "--train-tokenizer 512 --output data/new",
    "megatron-coca prepare --input books=books.jsonl.zst --train": "--train-tokenizer 512 --output data/new",
    "megatron-coca prepare --input mine": "",
    "megatron-coca prepare --input chats": "--output data/new",
    "megatron-coca inspect": "",
    "megatron-coca inspect checkpoint": "",
    "megatron-coca inspect mup": "--widths 64,128 --steps 1",
    "megatron-coca import models/llama-7b": "",
    "megatron-coca import downloads/llama-7b": "",
    "megatron-coca import tests/golden/authors": "",
    "megatron-coca export huggingface": "",
    "megatron-coca export peft": "",
    "megatron-coca export neox": "",
    "megatron-coca serve": "",
    "megatron-coca ablate configs/ablations/methods.yml --dry-run": "",
    "megatron-coca evaluate perplexity": WINDOWS,
    "megatron-coca evaluate perplexity --checkpoint runs/tutorial": "--num-documents 1",
    "megatron-coca evaluate passkey": f"--lengths 256 {RETRIEVAL}",
    "megatron-coca evaluate recall": "--cases 4 --diagnosed 2",
    "megatron-coca evaluate report runs/recall": "",
    "megatron-coca evaluate needle": f"--lengths 256 --depths 50 {RETRIEVAL}",
    "megatron-coca evaluate margin": "--lengths 256 --facts 2 --num-documents 1",
    "megatron-coca evaluate ruler": f"--lengths 256 {RETRIEVAL}",
    "megatron-coca evaluate analyse": "--lengths 64,128 --num-documents 1 --pairs 16 --queries 8",
    "megatron-coca evaluate speed": "--lengths 64 --rounds 1",
    "megatron-coca evaluate report": "",
    CHECKPOINT_SUITE: "",
    f'{CHECKPOINT_SUITE} --checkpoint "RoFormer=runs/tutorial': "--only perplexity",
}
"""Commands that are executed in `make_workspace`, and what is appended to make them small."""

CHAIN = "takes ten minutes in all; tests/integration/formats/test_finetuning_chain.py does the same"
SUITE_ITSELF = "a part of the tests, or all of them"
NEOX = "needs a checkout of GPT-NeoX; tests/integration/formats/test_neox_plugin.py runs it where there is one"
STORE = "needs an object store; tests/integration/faults/test_object_store_runs.py has one"
PILE = "needs 700 GB of corpora"
HOURS = "trains for hours; tests/integration/evaluation/test_ablation_runs.py trains small ones"
AMD = "changes only the speed on AMD processors with AVX-512"
DONE = "says how published numbers were made"
TIMED = "times transformers beside it, for minutes even if small"
PROGRAM = "a program of its own that is not installed here"
CUDA_WHEELS = "needs PyTorch's CUDA build, 5 GB; `make test-cuda` makes an environment that has it"

NOT_RUN = {
    "python docs/generate.py": "reads whole configurations; tests/unit/project/test_pages.py checks its tables",
    "make ": "installs, or runs the tests",
    "apt-get ": "installs packages of the system",
    "git clone ": "of benchmarks/gpu_report.md, on a rented machine",
    "cat results/gpu": "needs a GPU",
    "pip ": "changes the environment",
    "source ": "changes the shell",
    "mkdir ": "of docker/README.md",
    "docker ": PROGRAM,
    "megatron-coca export huggingface runs/coca": "uploads; test_export_push.py runs it",
    "megatron-coca download": "needs the Hugging Face Hub; tests/unit/commands/test_download.py has one",
    "megatron-coca chat": "holds a conversation at a terminal; tests/integration/product/test_typed_prompts.py has one",
    "aws ": PROGRAM,
    "vllm ": PROGRAM,
    "sbatch ": PROGRAM,
    "kubectl apply": PROGRAM,
    "python -m sglang": PROGRAM,
    "pre-commit ": "changes the checkout's hooks",
    "python -m pytest": SUITE_ITSELF,
    "python -m tests.pretend": CUDA_WHEELS,
    "python -m tests.soak": "repeats a failure; tests/integration/faults/test_soak.py runs a short soak",
    "PYTHONPATH=. python tests/golden": SUITE_ITSELF,
    "GPT_NEOX_HOME": NEOX,
    "NEOX_PLUGIN_OLDEST_PYTHON": NEOX,
    'sed \'s/"pos_emb": "rotary"/"pos_emb": "coca"/\' ~/gpt-neox': NEOX,
    "python -m megatron_coca.neox_plugin": NEOX,
    'python -c "import megatron_coca.neox_plugin': NEOX,
    "python deepy.py": NEOX,
    "megatron-coca train -d ~/gpt-neox": "needs a checkout of GPT-NeoX; tests load its files where there is one",
    "megatron-coca train configs/350M/roformer_coca.yml save=s3:": STORE,
    "megatron-coca evaluate perplexity --checkpoint s3:": STORE,
    "megatron-coca evaluate perplexity --checkpoint runs/coca --data s3:": STORE,
    "megatron-coca train configs/350M/roformer_coca.yml data_path=s3:": STORE,
    "megatron-coca train configs/350M/roformer_coca.yml configs/cluster/slurm.yml": "needs srun",
    "megatron-coca train configs/350M/roformer_coca.yml configs/data/pile_books_wiki_code.yml": PILE,
    "megatron-coca prepare configs/data/recipes/pile_books_wiki_code.yml": PILE,
    "megatron-coca inspect lengths data/pile_books_wiki_code": PILE,
    "megatron-coca evaluate lm-eval": "its data are on the Hugging Face hub; test_lm_eval.py has others",
    "python tools/fetch_benchmarks.py": "needs a network; test_fetch_benchmarks.py has servers of its own",
    "megatron-coca evaluate longppl": "needs another model; test_longppl.py has one",
    "megatron-coca evaluate suite configs/evaluation/paper_350m.yml": "needs four trained models and PG-19",
    "megatron-coca ablate configs/ablations": HOURS,
    "megatron-coca ablate studies/": HOURS,
    "megatron-coca ablate studies/methods/plan.yml": DONE,
    "megatron-coca train configs/recall/model.yml configs/recall/text.yml": "needs the corpus of the command before it",
    "megatron-coca prepare --input text=data/builtin": "tests/integration/faults/test_prepare.py prepares others",
    "OMP_NUM_THREADS=1 nice -n 15 megatron-coca train studies/methods": DONE,
    "megatron-coca evaluate perplexity --checkpoint runs/pilot": DONE,
    "megatron-coca train configs/finetune/small": CHAIN,
    "megatron-coca export huggingface runs/finetune": CHAIN,
    "megatron-coca import runs/finetune": CHAIN,
    "megatron-coca evaluate perplexity --checkpoint runs/finetune": CHAIN,
    "export LD_PRELOAD=": AMD,
    "echo 'int mkl_serv": AMD,
    "megatron-coca stretch": "reads SmolLM2 or books; test_stretch.py runs a small model",
    "python tools/bench_prepare.py --tables": "reads measurements; test_bench_prepare.py computes the tables",
    "python tools/bench_prepare.py": TIMED,
    "python tools/bench_train.py": TIMED,
    "OMP_NUM_THREADS=1 python tools/bench_train.py": TIMED,
    "python tools/gpu/sweep.py": "needs a GPU, or its results",
    "python tools/bench_methods.py": "times two methods side by side, for minutes",
    "python tools/bench_evaluation.py": "times SmolLM2 beside transformers, for minutes",
    "python tools/bench_families.py": "times models of 85 families, for hours",
    "python tools/bench_spinning.py": "times three kinds of work, for minutes; test_bench_spinning.py runs a short one",
    "python tools/bench_decoding.py": "times ways of decoding, for minutes; test_bench_decoding.py runs a small one",
    "python tools/bench_rings.py": "trains in six layouts, for minutes; test_bench_rings.py runs a small one",
    "OMP_WAIT_POLICY=passive megatron-coca train configs/quickstart": "the quickstart runs it without the variable",
    "python tools/bench_jobs.py": "times one evaluation twice, for minutes; test_bench_jobs.py runs a small one",
    "apt-get install": "installs packages on the machine",
    "tools/build_cpu_image.sh": "needs root and builds an image of 4 GB",
}
"""Commands that are not executed, and why. Arguments of this project's commands are parsed all the same."""

PRELUDES = {
    "docs/attention.md": (
        "import torch\nfrom megatron_coca import load_model\nmodel = load_model('runs/quickstart/roformer_coca')\n"
        "prompt, new = 4, 2\nprompt_ids, next_id = torch.ones(1, 4, dtype=int), torch.ones(1, 1, dtype=int)\n"
    ),
    "docs/checkpoints.md": "import torch\ninput_ids = torch.ones(1, 8, dtype=int)\n",
    "docs/report.md": (
        "from megatron_coca.cli import main\nfrom tests.examples import write_model\n"
        "longer = {'seq_length': 256, 'max_position_embeddings': 256}\n"
        "write_model('configs/quickstart/roformer.yml', 'runs/reported', longer, 'data/builtin/tokenizer.model')\n"
        "options = '--checkpoint runs/reported --lengths 1L,2L --cases 4 --diagnosed 0 --shifts 0 --output results'\n"
        "assert main(['evaluate', 'recall', *options.split()]) == 0\n"
        "assert main(['evaluate', 'report', 'results', '--output', 'results/report']) == 0\n"
    ),
    "docs/retrieval.md": (
        "import torch\nfrom megatron_coca import load_model\nfrom megatron_coca.data import load_tokenizer\n"
        "model = load_model('runs/quickstart/roformer_coca')\nprompts = torch.ones(1, 4, dtype=int)\n"
        "tokenizer = load_tokenizer('SPMTokenizer', 'data/builtin/tokenizer.model')\n"
    ),
    "docs/serving.md": (
        "import torch\nfrom transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer\n"
        "model = AutoModelForCausalLM.from_pretrained('exported/350M_coca', trust_remote_code=True)\n"
        "batches = [torch.ones(1, 8, dtype=int)]\n"
    ),
}
"""Names that the Python blocks of a page expect, which all run in one namespace, in their order."""

QUICK = ("README.md", "docs/attention.md", "docs/config.md", "docs/proofs.md")
"""Pages whose Python blocks are run by the fast tests, the others by the slow one."""

SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 1024}
BATCH: dict[str, Any] = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "precision": "fp32"}
STEPS: dict[str, Any] = {"train_iters": 4, "checkpoint_factor": 2, "eval_interval": 4, "eval_iters": 1}
LOCAL: dict[str, Any] = {"distributed_backend": "gloo", "hostfile": None, "launcher": None}
LLAMA: dict[str, Any] = SHAPE | BATCH | STEPS | {"intermediate_size": 192, "sequence_parallel_size": 1}
SHORT_STAGES = [{"until": 2, "trainable": ["key"]}, {"reset_optimizer": True}]
EXTENDED = {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 64}
SMALLER: dict[str, dict[str, Any]] = {
    "350M/*.yml": SHAPE | {"num_layers": 6} | BATCH | STEPS | {"seq_length": 64},
    "quickstart/*.yml": SHAPE | STEPS | {"train_micro_batch_size_per_gpu": 4},
    "cluster/a100x8.yml": BATCH | LOCAL | {"num_gpus": 2, "gradient_accumulation_steps": 1},
    "cluster/a100x32.yml": BATCH | LOCAL | {"num_gpus": None, "gradient_accumulation_steps": 2},
    "finetune/llama7b_coca.yml": LLAMA | {"seq_length": 64, "stages": SHORT_STAGES},
    "finetune/llama7b_*pi_32k.yml": LLAMA | {"seq_length": 128, "rope_scaling": EXTENDED},
    "evaluation/checkpoint.yml": {
        "tasks": {
            "perplexity": {"windows": ["1L", "2L"], "stride": "1L", "num_documents": 1},
            "passkey": {"lengths": ["4L"], "cases": 1, "max_new_tokens": 4},
            "analyse": {"lengths": ["1L"], "num_documents": 1, "pairs": 16, "queries": 8},
        }
    },
}
"""Keys of configuration files that are smaller in the workspace."""


def treatment(command: str) -> tuple[str, str]:
    """("run", what to append) or ("not run", the reason). Raises LookupError for a command without a row."""
    fitting = [beginning for beginning in (*RUN, *NOT_RUN) if command.startswith(beginning)]
    if not fitting:
        raise LookupError(f"{command}\nAdd its beginning to RUN or NOT_RUN in tests/examples.py.")
    longest = max(fitting, key=len)
    return ("run", RUN[longest]) if longest in RUN else ("not run", NOT_RUN[longest])


def make_configs(folder: Path) -> None:
    """Copy `configs/`, smaller, into a folder that is the present one."""
    shutil.copytree(ROOT / "configs", folder / "configs")
    for pattern, keys in SMALLER.items():
        paths = sorted((folder / "configs").glob(pattern))
        assert paths, pattern
        for path in paths:
            path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | keys, sort_keys=False))


def write_model(file: str, save: str, keys: Mapping[str, Any] | None = None, vocab_file: str | None = None) -> Path:
    """A checkpoint of step 500 with fresh weights, in the shape of a file of the workspace."""
    named = {"tokenizer_type": "SPMTokenizer", "vocab_file": vocab_file} if vocab_file else {}
    config = load_config([file], named | dict(keys or {}))
    tokenizer = load_tokenizer("SPMTokenizer", vocab_file) if vocab_file else None
    return write_checkpoint(Path(save), config, tokenizer=tokenizer, step=500)


def make_workspace(folder: Path) -> None:
    """All that documented commands read, in `folder`, which is the present one: the project, models, data, results."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("megatron_coca", "tools", "tests/golden/authors"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("train.py", "evaluate.py", "README.md"):
        shutil.copy(ROOT / name, folder)
    for name in ("docs", "data", "models", "results"):
        (folder / name).mkdir()
    for path in (*(ROOT / "docs").glob("*.md"), ROOT / "docs/generate.py"):
        shutil.copy(path, folder / "docs")
    for path in (*(ROOT / "studies").glob("*/*.yml"), *(ROOT / "studies").glob("*/*.zst"), ROOT / "studies/README.md"):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    make_configs(folder)
    make_data(folder)
    pieces = "data/builtin/tokenizer.model"
    for name in ("350M_roformer", "350M_roformer_coca"):
        write_model(f"configs/350M/{name.removeprefix('350M_')}.yml", f"runs/{name}", vocab_file=pieces)
    write_model("configs/350M/roformer.yml", "runs/350M_pope", {"pos_emb": "pope"}, pieces)
    write_model("configs/quickstart/roformer_coca.yml", "runs/quickstart/roformer_coca", vocab_file=pieces)
    write_model("configs/quickstart/roformer.yml", "runs/drope", {"pos_emb": "none"}, pieces)
    llama = "configs/finetune/llama7b_coca.yml"
    write_model(llama, "runs/llama7b_coca", {"stages": None}, pieces)
    write_model(llama, "runs/llama", {"pos_emb": "rotary", "stages": None}, pieces)
    for name in ("models/llama-7b", "downloads/llama-7b"):
        export("runs/llama", name)
        shutil.copy(pieces, folder / name)
    make_adapters(Path("adapters"), Path("models/llama-7b"))
    write_trained_adapters("models/llama-7b", Path("runs/lora"), {"rank": 2, "also": ["norms"]})
    shutil.copy("models/llama-7b/tokenizer.json", "20B_tokenizer.json")
    exports = {
        "350M_roformer": "350M_roformer",
        "coca": "350M_roformer_coca",
        "350M_coca": "350M_roformer_coca",
        "llama7b_coca": "llama7b_coca",
        "merged": "llama7b_coca",
    }
    for name, run in exports.items():
        export(f"runs/{run}", f"made/{name}")
    for name in ("neox_run", "runs/theirs"):
        export_neox("runs/350M_roformer", name)
    (folder / "results/pilot").mkdir()
    for path in (ROOT / "studies/methods/pilot").glob("*.json"):
        text = path.read_text().replace("RoFormer RoFormer", "RoFormer")  # the label that documents compare with
        (folder / "results/pilot" / path.name).write_text(text)


def make_adapters(folder: Path, base: Path) -> None:
    """Adapters of rank 2 for the query projection of the first layer of a LLaMA folder."""
    width = json.loads((base / "config.json").read_text())["hidden_size"]
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    adapters = {f"{name}.lora_A.weight": torch.ones(2, width), f"{name}.lora_B.weight": torch.ones(width, 2)}
    save_file(adapters, folder / "adapter_model.safetensors")


def make_data(folder: Path) -> None:
    """The built-in corpus, the inputs that documents name, and what was prepared from them."""
    import pyarrow
    import pyarrow.parquet
    import zstandard

    prepare_builtin(Path("data"), progress=False)
    text, code = (folder / f"data/builtin/{name}.jsonl" for name in ("text", "code"))
    Path("books.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(text.read_bytes()))
    documents = [json.loads(line)["text"] for line in code.read_text().splitlines()[:20]]
    pyarrow.parquet.write_table(pyarrow.table({"text": documents}), "code.parquet")
    chat = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A small model."}]
    Path("chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    Path("chat.jinja").write_text(
        "{% for message in messages %}{{ message.role + ': ' + message.content }}\n{% endfor %}"
    )
    Path("book.txt").write_text("The sea was calm")
    Path("pg19/test").mkdir(parents=True)
    Path("pg19/test/1.txt").write_text("The sea was calm and a small boat lay near its shore. " * 100)
    tokenizer = load_tokenizer("SPMTokenizer", "data/builtin/tokenizer.model")
    for name in ("mine", "llama"):
        sources = [CorpusSource(SourceSpec("books", [Path("books.jsonl.zst")]))]
        prepare(sources, Path("data", name), tokenizer, Rules(), Execution(progress=False))
