"""An adapter from our models to lm-evaluation-harness 0.4.13, and task loading.

This module cannot be imported without lm_eval.
"""

import difflib
import importlib
import math
import random
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM, TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.tasks.answers import finished_by
from megatron_coca.evaluation.tasks.lm_eval.data import TaskData, is_by_length
from megatron_coca.evaluation.tasks.lm_eval.prompts import InputLimits, PromptEncoding, render_chat
from megatron_coca.evaluation.tasks.perplexity.measure import score_hidden
from megatron_coca.model import DYNAMIC_LENGTH, GPT, NOT_GENERATED, DynamicLength, equal_length_batches, generate
from megatron_coca.support.console import Progress

BOOTSTRAP = 1000
"""Number of bootstrap samples for standard errors without a closed formula."""
GREEDY_SETTINGS = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1}
"""Generation settings, each with the value that means greedy decoding."""
IGNORED_SETTINGS = frozenset({"until", "max_gen_toks", "temperature", "top_p", "top_k", "min_p", "use_cache"})
"""Generation settings that are handled elsewhere or have no effect on greedy decoding."""

Tokens = tuple[int, ...]
TokenizedRequest = tuple[tuple[str, str] | None, list[int], list[int]]
"""A request of the harness: its texts or None, the context tokens and the continuation tokens."""


class HarnessModel(TemplateLM):
    """Answers the harness's requests like HFLM, the harness's own class, so that scores are comparable.

    HFLM itself would compute a length-dependent extension for the longest input of a batch. It also pads prompts on
    the left, which not every position method supports. Here all inputs of a batch have the same length.

    `encoding` encodes texts. Inputs longer than `limits.max_length` are truncated, and `cut` maps each task to the
    documents with truncated inputs. `unfinished` maps each task to the documents with an answer that had not ended
    after the task's number of new tokens.

    `model` is in evaluation mode. A forward pass has at most `tokens_per_batch` tokens, but at least one input. Ids
    from `vocab_size` on are padding and are never generated. `tokens` counts the scored or generated tokens.
    """

    def __init__(
        self,
        model: GPT,
        encoding: PromptEncoding,
        limits: InputLimits,
        tokens_per_batch: int,
        vocab_size: int,
        dynamic_length: DynamicLength = DYNAMIC_LENGTH,
    ) -> None:
        super().__init__()
        self.model, self.encoding, self.limits = model, encoding, limits
        self.tokens_per_batch, self.vocab_size = tokens_per_batch, vocab_size
        self.dynamic_length = dynamic_length
        self.model_device = next(model.parameters()).device
        self.tokens = 0
        self.cut: dict[str, set[int]] = {}
        self.unfinished: dict[str, set[int]] = {}
        self._cut_texts: set[tuple[str, str]] = set()
        self._told: set[str] = set()

    @property
    def eot_token_id(self) -> int:
        return self.encoding.tokenizer.eos

    @property
    def prefix_token_id(self) -> int:
        return self.encoding.prefix

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's fingerprint. The harness uses it in keys of its request cache, which we do not use."""
        return self.encoding.tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.encoding.encode(string, add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return render_chat(self.encoding.tokenizer, chat_history, add_generation_prompt, self._told)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self._cut_texts = set()
        scores = super().loglikelihood(requests, disable_tqdm)
        for request in requests:
            if request.args in self._cut_texts:
                self._note(request, self.cut)
        return scores

    def _note(self, request: Instance, noted: dict[str, set[int]]) -> None:
        noted.setdefault(str(request.task_name), set()).add(int(request.doc_id or 0))

    def _loglikelihood_tokens(
        self, requests: Sequence[TokenizedRequest], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood in nats, and whether greedy decoding would produce it.

        The results do not depend on the order of the requests. Identical inputs are computed once.
        """
        scorings: list[tuple[Tokens, Tokens]] = []
        by_input: dict[Tokens, set[Tokens]] = {}
        longest = self.limits.max_length
        for texts, context, continuation in requests:
            if not continuation or (longest is not None and len(continuation) > longest):
                raise EvaluationError(
                    f"the continuation {'of a window' if texts is None else repr(texts[1][:60])}: has "
                    f"{len(continuation)} tokens, but 1 to {longest or 'any number'} can be scored; "
                    "correct the task, or raise --max-length"
                )
            tokens = (context or [self.prefix_token_id]) + continuation
            if longest is not None and len(tokens) > longest + 1:
                tokens = self.limits.shortened(tokens, longest + 1, len(continuation) + 1)
                if texts is not None:
                    self._cut_texts.add(texts)
            scorings.append((tuple(tokens[:-1]), tuple(continuation)))
            by_input.setdefault(scorings[-1][0], set()).add(scorings[-1][1])
            self.tokens += len(continuation)
        inputs, scores = sorted(by_input), {}
        with torch.inference_mode(), Progress("scoring", len(inputs), "inputs") as progress:
            for batch in equal_length_batches(list(map(len, inputs)), 0, self.tokens_per_batch):
                rows = torch.tensor([inputs[index] for index in batch], device=self.model_device)
                for index, hidden in zip(batch, self.model.hidden_states(rows), strict=True):
                    for scored in by_input[inputs[index]]:
                        targets = torch.tensor(scored, device=self.model_device)
                        nll, correct = score_hidden(self.model, hidden[-len(scored) :], targets).tolist()
                        if not math.isfinite(nll):  # otherwise a task would pick a choice from invalid numbers
                            raise EvaluationError(
                                f"log-likelihood: {-nll}: the computation overflowed its dtype, or the weights are "
                                "not finite; use --dtype float32 or bfloat16"
                            )
                        scores[inputs[index], scored] = -nll, round(correct) == len(scored)
                progress.advance(len(batch))
        return [scores[scoring] for scoring in scorings]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return log-likelihoods of whole texts in nats, computed over the same disjoint windows as in the harness."""
        windows: list[TokenizedRequest] = []
        counts = []
        for (text,) in (request.args for request in requests):
            # --start-token is only context; a start token that the library adds is scored too, as HFLM does.
            ids = self.tok_encode(text, None if self.encoding.start is None else False)
            pairs = list(get_rolling_token_windows(ids, self.prefix_token_id, self.limits.window, 1))
            windows += [(None, *make_disjoint_window(pair)) for pair in pairs]
            counts.append(len(pairs))
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return greedy continuations. No continuation depends on the order of the requests.

        All prompts of a batch have the same length and settings. Raises EvaluationError for tasks that sample, or if
        the new tokens leave no room for a prompt.
        """
        asked = []
        texts: dict[tuple[int, tuple[str, ...]], dict[Tokens, tuple[str, bool]]] = {}
        for request in requests:
            (context, settings), task = request.args, str(request.task_name)
            new_tokens, stops = greedy_limits(task, settings)
            prompt = self.tok_encode(context) or [self.prefix_token_id]
            if (room := self._room(task, new_tokens)) is not None and len(prompt) > room:
                prompt = self.limits.shortened(prompt, room)
                self._note(request, self.cut)
            asked.append((texts.setdefault((new_tokens, stops), {}), tuple(prompt)))
            texts[new_tokens, stops][tuple(prompt)] = "", False
        with Progress("generating", sum(map(len, texts.values())), "texts") as progress:
            for (new_tokens, stops), answers in texts.items():
                prompts = sorted(answers)
                for batch in equal_length_batches(list(map(len, prompts)), new_tokens, self.tokens_per_batch):
                    rows = [prompts[index] for index in batch]
                    answers |= zip(rows, self._continue(rows, new_tokens, stops), strict=True)
                    progress.advance(len(batch))
        for request, (answers, key) in zip(requests, asked, strict=True):
            if answers[key][1]:
                self._note(request, self.unfinished)
        found = [answers[prompt][0] for answers, prompt in asked]
        self.tokens += sum(len(self.tok_encode(text, False)) for text in found)
        return found

    def _room(self, task: str, new_tokens: int) -> int | None:
        """Return the maximum prompt length, or None without a limit. Raises EvaluationError if it is below 1."""
        if self.limits.max_length is None:
            return None
        room = self.limits.max_length - new_tokens
        if room < 1:
            raise EvaluationError(
                f"task {task}: {new_tokens} new tokens leave no room for a prompt within --max-length "
                f"{self.limits.max_length}; raise --max-length"
            )
        return room

    def _continue(self, prompts: Sequence[Tokens], new_tokens: int, stops: tuple[str, ...]) -> list[tuple[str, bool]]:
        """Return (answer, whether it had not ended after `new_tokens` tokens) for each prompt."""
        tokenizer, stops = self.encoding.tokenizer, (*stops, *self.encoding.stops)
        # A stop string may be the name of a special token. `spell` keeps these names, and `decode` leaves them out.
        finished = finished_by(set(self.encoding.ends), stops, tokenizer.spell)
        answers = generate(
            self.model,
            torch.tensor(prompts, dtype=torch.int64, device=self.model_device),
            new_tokens,
            finished=finished,
            vocab_size=self.vocab_size,
            dynamic_length=self.dynamic_length,
        )
        # The token that ends a text is decoded too, as HFLM does. A special token decodes to no text.
        kept = ([token for token in answer if token != NOT_GENERATED] for answer in answers.tolist())
        return [
            (postprocess_generated_text(tokenizer.decode(ids), list(stops), None), not finished(ids)) for ids in kept
        ]


def greedy_limits(task: str, settings: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
    """Return the maximum number of new tokens and the stop strings of a task's `generation_kwargs`.

    Raises EvaluationError for any decoding other than greedy.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    normalized: dict[str, Any] = {**normalize_gen_kwargs(given)}
    others = normalized.keys() - IGNORED_SETTINGS
    if sampling := sorted(name for name in others if normalized[name] != GREEDY_SETTINGS.get(name)):
        raise EvaluationError(
            f"task {task}: generation_kwargs: {', '.join(sampling)}: only greedy decoding is supported; "
            "remove the setting from the task's file"
        )
    return normalized["max_gen_toks"], tuple(filter(None, normalized["until"]))


def index_tasks(
    names: Sequence[str],
    include: Sequence[Path],
    metadata: Mapping[str, Any] | None = None,
    plain: Sequence[str] = (),
) -> TaskManager:
    """Index the task files in the folders `include`, which take precedence, and the harness's own task files.

    The harness has thousands of task files, which are slow to read; they are read only if a name is not in `include`.
    `metadata` is passed to the code of all tasks. `plain` are the names of `--plain-tasks`. Raises EvaluationError for
    an unknown name.
    """
    import_evaluate_library()
    for folder in include:
        if not folder.is_dir():
            raise EvaluationError(f"--include-path {folder}: no such folder; name one with task files (*.yaml)")
    settings: dict[str, Any] = {"include_path": [*include], "metadata": {**(metadata or {})}}
    manager = TaskManager(**settings, include_defaults=False)
    if {*names, *plain} <= set(manager.all_subtasks):
        return manager
    manager = TaskManager(**settings)
    if unknown := [name for name in (*names, *plain) if name not in manager.task_index]:
        near = difflib.get_close_matches(unknown[0], manager.all_tasks, n=3)
        option = "--tasks" if unknown[0] in names else "--plain-tasks"
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise EvaluationError(
            f"{option} {unknown[0]}: no such task, group or tag{hint}; name a folder of your own tasks with "
            "--include-path"
        )
    return manager


def import_evaluate_library() -> None:
    """Import Hugging Face's `evaluate` library, if installed, before a script named evaluate.py can shadow it."""
    path = sys.path
    sys.path = [entry for entry in path if not (Path(entry or ".") / "evaluate.py").is_file()]
    try:
        importlib.import_module("evaluate")
    except ImportError:
        pass  # a task that needs the library reports that it is missing
    finally:
        sys.path = path


def evaluate_task(
    model: LM,
    manager: TaskManager,
    name: str,
    num_fewshot: int | None,
    limit: int | None,
    seed: int,
    chat: Mapping[str, Any] | None = None,
    data: TaskData | None = None,
    plain: Collection[str] = (),
) -> dict[str, Any]:
    """Return the harness's results for a task or group, with samples. The results do not depend on earlier runs.

    `chat` contains the harness's settings `system_instruction` and `fewshot_as_multiturn`. If `chat` is set, prompts
    are chats, except those of the tasks in `plain`.
    """
    with (data or TaskData()).provided(seed, limit):
        loaded = manager.load([name])
    random.seed(seed)
    np.random.seed(seed)
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        if num_fewshot is not None and own != 0:
            task.set_config(key="num_fewshot", value=num_fewshot)
        elif own is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=seed)
        if task.config.task in plain:
            _keep_plain(task)
    settings = {} if chat is None else {**chat, "apply_chat_template": True}
    if all(is_by_length(task) for task in loaded["tasks"].values()):
        limit = None  # `data` has applied the limit to every length
    results = evaluate(lm=model, task_dict=loaded, limit=limit, bootstrap_iters=BOOTSTRAP, log_samples=True, **settings)
    assert results is not None, "the harness returns None only in processes other than the first"
    return dict(results)


def _keep_plain(task: Any) -> None:
    """Keep the prompts of a task plain text, even if the prompts of other tasks are chats."""
    build = task.build_all_requests
    plain = {"apply_chat_template": False, "chat_template": None, "system_instruction": None, "tokenizer_name": ""}

    def build_plain(**settings: Any) -> None:
        build(**{**settings, **plain, "fewshot_as_multiturn": False})

    task.build_all_requests = build_plain
