"""Prompts of lm-eval against the harness's own HFLM on Hugging Face folders: special tokens, start and end tokens,
chats, truncation.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from lm_eval.models.huggingface import HFLM
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from megatron_coca.checkpoints import load_checkpoint
from megatron_coca.checkpoints.importing import import_checkpoint
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.tasks.lm_eval.model import evaluate_task, index_tasks
from tests.parity.evaluation.test_harness import flat
from tests.unit.data.tokenizers.test_chat import CHATML
from tests.unit.evaluation.harness_cases import WORDS, adapter, command, read, requests, write_tasks

SPECIAL = ["<|endoftext|>", "<s>", "<|im_end|>", "<|im_start|>"]
END, BOS, TURN = 0, 1, 2
DOCUMENTS = 4
"""Of those of harness_cases.py."""
NAMED = "<|im_start|>user\\n{{question}}<|im_end|>\\n<|im_start|>assistant\\n"
"""A prompt that spells the tokens of ChatML."""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The task files of harness_cases.py, and tasks with prompts in ChatML."""
    folder = write_tasks(tmp_path_factory.mktemp("tasks"))
    for name in ("choice", "until"):
        text = (folder / f"{name}.yaml").read_text().replace(f"task: local_{name}", f"task: named_{name}")
        text = text.replace('"{{question}}\\nAnswer:"', f'"{NAMED}"').replace('"{{question}}"', f'"{NAMED}"')
        (folder / f"named_{name}.yaml").write_text(text)
    free = (folder / "until.yaml").read_text().replace("task: local_until", "task: free_until")
    (folder / "free.yaml").write_text(free[: free.index("generation_kwargs")] + UNSTOPPED)
    (folder / "prefixed.yaml").write_text(
        (folder / "free.yaml").read_text().replace("free_until", "prefixed_until") + 'gen_prefix: "The answer is"\n'
    )
    return folder


UNSTOPPED = """\
generation_kwargs: {until: ["zzz"], max_gen_toks: 16, do_sample: false}
metric_list: [{metric: exact_match}]
fewshot_split: test
"""


def llama(folder: Path, begun: bool = False, ends: Any = END, generation: Any = None, **settings: Any) -> Path:
    """A random LLaMA with a byte-level BPE; `begun` puts `<s>` before every text, `settings` are the tokenizer's."""
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator([" ".join(WORDS)] * 9, vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    if begun:
        made._tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", BOS)])
    given = {"bos_token": "<s>", "eos_token": "<|endoftext|>"} | settings
    fast = PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, **given)
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    torch.manual_seed(3)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(fast), max_position_embeddings=512, eos_token_id=END, **size)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
        # So that most texts contain the end of a turn, some the end of text, and few begin with them.
        often = 2 * model.lm_head.weight.std() * torch.randn(32, generator=torch.Generator().manual_seed(5))
        model.lm_head.weight[TURN], model.lm_head.weight[END] = often, -0.8 * often
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    content = json.loads((folder / "config.json").read_text()) | {"eos_token_id": ends}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def compare(
    folder: Path,
    tasks: Path,
    name: str,
    output: Path,
    *options: object,
    chat: Any = None,
    checkpoint: Path | None = None,
    **theirs: Any,
) -> list[Any]:
    """Every answer of the command equals HFLM's; returns them. `checkpoint` is the command's, by default `folder`."""
    shots = {"num_fewshot": 2} if chat is not None else {}
    manager = index_tasks([name], [tasks])
    hflm = HFLM(pretrained=str(folder), device="cpu", batch_size=1, **theirs)
    expected = evaluate_task(hflm, manager, name, shots.get("num_fewshot"), DOCUMENTS, 1234, chat)
    given = ["--limit", DOCUMENTS, *(["--num-fewshot", 2] if shots else [])]
    assert (
        command(checkpoint or folder, tasks, name, *options, *given, "--log-samples", "--output", output / "a.json")
        == 0
    )
    lines = (output / "a.samples" / f"{name}.jsonl").read_text().splitlines()
    found = {row["doc_id"]: row for row in map(json.loads, lines)}
    for sample in expected["samples"][name]:
        ours = found[sample["doc_id"]]
        assert ours["prompt_hash"] == sample["prompt_hash"]
        if name.endswith("until"):
            assert ours["resps"] == [[flat(sample["resps"])[0]]]
        else:
            assert [float(value) for value in flat(ours["resps"]) if value not in ("True", "False")] == pytest.approx(
                [value for value in flat(sample["resps"]) if not isinstance(value, bool)], abs=1e-3
            )
    return [flat(sample["resps"])[0] for sample in expected["samples"][name]]


@pytest.mark.parametrize("name", ["named_choice", "named_until", "local_choice", "local_rolling"])
@pytest.mark.parametrize(
    ("begun", "settings"),
    [(False, {}), (True, {}), (False, {"bos_token": None}), (False, {"split_special_tokens": True})],
    ids=["bos", "begun", "no bos", "splits"],
)
def test_special_tokens_in_and_around_prompts(
    name: str, begun: bool, settings: dict[str, Any], tasks: Path, tmp_path: Path
) -> None:
    folder = llama(tmp_path / "model", begun, **settings)
    compare(folder, tasks, name, tmp_path)


@pytest.mark.parametrize(("begun", "token"), [(True, ""), (False, "<s>")])
def test_another_start_token(begun: bool, token: str, tasks: Path, tmp_path: Path) -> None:
    folder = llama(tmp_path / "model", begun)
    compare(folder, tasks, "named_choice", tmp_path, "--start-token", token, add_bos_token=token != "")
    assert read(tmp_path / "a.json").protocol.start == (BOS if token else None)


def test_a_token_behind_every_text_is_part_of_the_measurement(tasks: Path, tmp_path: Path) -> None:
    folder, path = llama(tmp_path / "model", add_bos_token=True), tmp_path / "a.json"
    given = (folder, tasks, "local_choice", "--limit", 1, "--output", path)
    assert command(*given) == 0 and read(path).protocol.closes is None
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"add_bos_token": True, "add_eos_token": True}))
    with pytest.raises(EvaluationError, match="another measurement .different protocol.closes."):
        command(*given)


def test_a_template_that_rejects_the_system_message(
    tasks: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is left out, as by HFLM, with one warning for a task."""
    folder = llama(tmp_path / "model")
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    (folder / "chat_template.jinja").write_text(refusing + CHATML)
    chat = {"system_instruction": "Be brief.", "fewshot_as_multiturn": True}
    options = ["--apply-chat-template", "--system-instruction", "Be brief."]
    compare(folder, tasks, "local_choice", tmp_path, *options, chat=chat)
    assert caplog.text.count("(no system)") == 1 and "the system message is left out" in caplog.text


@pytest.mark.parametrize("name", ["named_choice", "local_rolling", "free_until"])
def test_an_imported_folder_is_the_same_model(name: str, tasks: Path, tmp_path: Path) -> None:
    folder = llama(tmp_path / "model", begun=True, ends=[END, TURN])
    imported = import_checkpoint(folder, tmp_path / "imported").folder
    compare(folder, tasks, name, tmp_path, checkpoint=imported)
    assert read(tmp_path / "a.json").protocol.adds


@pytest.mark.parametrize("place", ["config.json", pytest.param("generation_config.json", marks=pytest.mark.slow)])
def test_every_end_token_ends_a_text(place: str, tasks: Path, tmp_path: Path) -> None:
    ends = {"ends": [END, TURN]} if place == "config.json" else {"generation": [END, TURN]}
    one = compare(llama(tmp_path / "one"), tasks, "free_until", tmp_path / "1")
    several = compare(llama(tmp_path / "several", **ends), tasks, "free_until", tmp_path / "2")
    assert one != several and sum(map(len, several)) < sum(map(len, one))
    assert read(tmp_path / "2" / "a.json").protocol.ends == [END, TURN]


@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize("name", ["local_choice", "free_until", "prefixed_until"])
def test_chats(name: str, turns: bool, tasks: Path, tmp_path: Path) -> None:
    folder = llama(tmp_path / "model", ends=[END, TURN])
    chat = {"system_instruction": "Be brief.", "fewshot_as_multiturn": turns}
    options = ["--apply-chat-template", "--system-instruction", "Be brief.", "--fewshot_as_multiturn", turns]
    compare(folder, tasks, name, tmp_path, *options, chat=chat)
    record = read(tmp_path / "a.json").protocol.chat
    assert record is not None and (record.system, record.multiturn) == ("Be brief.", turns)


def test_plain_tasks_beside_chats(tasks: Path, tmp_path: Path) -> None:
    """Their prompts are those of a run without chats; the option is part of the measurement."""
    folder, names = llama(tmp_path / "model"), "local_choice,free_until"
    given = ["--limit", 2, "--output"]
    chat = ["--apply-chat-template", "--system-instruction", "Be brief."]
    results = []
    for name, options in {"plain": [], "chat": chat, "both": [*chat, "--plain-tasks", "free_until"]}.items():
        assert command(folder, tasks, names, *options, *given, tmp_path / f"{name}.json") == 0
        results.append(read(tmp_path / f"{name}.json"))
    (plain_free, plain), (chat_free, chats), (both_free, both) = (
        [entry.prompts_sha256 for entry in result.results] for result in results
    )
    assert both_free == plain_free != chat_free and both == chats != plain
    assert results[2].protocol.plain_tasks == ["free_until"]
    with pytest.raises(EvaluationError, match=r"different protocol\.plain_tasks"):
        command(folder, tasks, names, *chat, *given, tmp_path / "both.json")
    with pytest.raises(EvaluationError, match="--plain-tasks: .*without --apply-chat-template"):
        command(folder, tasks, names, "--plain-tasks", "free_until")
    with pytest.raises(EvaluationError, match="--plain-tasks free: no such task"):
        command(folder, tasks, names, *chat, "--plain-tasks", "free")


def test_a_continuation_within_a_token_of_its_context_is_an_error(tmp_path: Path) -> None:
    """One token holds the end of the context and the continuation, so that nothing is left to score."""
    import_checkpoint(llama(tmp_path / "model"), tmp_path / "run")
    model = adapter(load_checkpoint(tmp_path / "run"))
    word = next(word for word in WORDS if len(word) > 2 and len(model.tok_encode(word)) == 1)
    with pytest.raises(EvaluationError, match=f"the continuation '{word[1:]}': has 0 tokens"):
        model.loglikelihood(requests("loglikelihood", [(word[:1], word[1:])]))


@pytest.mark.parametrize(("name", "length"), [("local_choice", 14), ("free_until", 22)])
def test_cut_prompts_are_hflms_and_counted(
    name: str,
    length: int,
    tasks: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = llama(tmp_path / "model", begun=True)
    compare(folder, tasks, name, tmp_path, "--max-length", length, max_length=length)
    (cell,) = read(tmp_path / "a.json").results
    lines = (tmp_path / "a.samples" / f"{name}.jsonl").read_text().splitlines()
    assert 0 < cell.cut == sum(json.loads(line)["cut"] for line in lines) < cell.samples
    assert f"prompts of {cell.cut} of {cell.samples} samples exceed --max-length {length} " in caplog.text
    assert f"{cell.cut} of {cell.samples} prompts cut" in capsys.readouterr().out
