"""Prepare shards from a corpus: tokenize the corpus in blocks, write the documents of the blocks to shards, and
complete the output folder. Each task writes some of the shards. If the process is killed, finished blocks and shards
are kept.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_coca.data.errors import DataError
from megatron_coca.data.preparation import manifest
from megatron_coca.data.preparation.acceptance import check_tokenizer
from megatron_coca.data.preparation.blocks import (
    Blocks,
    TokenizerSource,
    blocks_folder,
    contents,
    cut,
    made_from,
    remove_blocks,
    settings_of,
)
from megatron_coca.data.preparation.faults import check_faults
from megatron_coca.data.preparation.few_documents import with_splits
from megatron_coca.data.preparation.manifest import Findings, WrittenShard
from megatron_coca.data.preparation.preparation_plan import (
    CorpusSource,
    Execution,
    Inputs,
    Rules,
    check,
    find_inputs,
    no_usable_document,
)
from megatron_coca.data.preparation.shard_files import collect
from megatron_coca.data.preparation.shard_plan import divide
from megatron_coca.data.preparation.stages import STAGES, run_stages
from megatron_coca.support.console import write
from megatron_coca.work.folders import atomic_dir, require_new


def prepare(
    sources: Sequence[CorpusSource],
    output: Path,
    tokenizer: TokenizerSource,
    rules: Rules | None = None,
    execution: Execution | None = None,
    notes: dict[str, Any] | None = None,
) -> Path:
    """Tokenize `sources` into `<output>/<source>[_<set>]_{train,valid,test}.{bin,idx}`.

    The folder also contains the tokenizer, `manifest.json`, and `data.yml` with the keys about data for the
    configuration of a run. Every document ends with `tokenizer.eod`. The result depends neither on `execution` nor on
    interruptions.

    The folder appears only after it is complete. Until then, the tokenized blocks and the complete shards are kept in
    `.<output>.blocks`. If the process is killed or an error occurs, the same call resumes from these files. If the
    folder is complete already and has the same settings and inputs, nothing is done.

    Args:
        sources: sources in reading order. If several documents have the same text, the first one is kept.
        output: the folder to create.
        tokenizer: a tokenizer, or a function that trains a tokenizer in a given folder.
        rules: the rules that apply to all sources.
        execution: settings that do not affect the result.
        notes: further settings that determine the result, such as the settings of the tokenizer training.

    Returns the path of `manifest.json`. Raises `DataError` if a path is missing, if a source has no usable document or
    too many faulty records, if the tokenizer loses text, if a file is damaged or changes while it is read, if `output`
    exists or cannot be written, or if another process is preparing it.
    """
    rules, execution = rules or Rules(), execution or Execution()
    check(sources, rules)
    output, inputs = Path(output), find_inputs(sources)
    sources = with_splits(sources, inputs, rules)
    if (output / manifest.MANIFEST).is_file():
        remove_blocks(output)  # left over if an earlier call was killed after the folder was complete
    if (done := completed(sources, output, tokenizer, rules, notes)) is not None:
        return done
    require_new(output, DataError)
    with atomic_dir(output, DataError) as folder:
        try:
            with _work_is_kept(output):
                settings = settings_of(sources, tokenizer, rules, notes)
                origin = made_from(inputs, settings, rules)
                blocks = Blocks(sources, inputs, output, tokenizer, rules, settings)
                if blocks.chat_time is not None:
                    settings["chat"]["time"] = blocks.chat_time
                blocks.make(blocks.missing(), execution)
                blocks.tokenizer.save(folder)
                plan = blocks.plan(rules.shard_bytes)
                _remove_other_plans(plan.folder)
                run_stages(plan, execution)
                shards, findings = collect(plan, folder)
                _check_findings(sources, inputs, shards, findings)
                for source, found in zip(sources, findings, strict=True):
                    check_tokenizer(source.spec.name, found.sample, blocks.tokenizer, rules)
                if rules.shard_gib is not None:
                    settings["shard_gib"] = rules.shard_gib
                record = manifest.build_manifest(sources, blocks.tokenizer, settings, inputs, shards, findings)
                manifest.write_run_config(folder, output, sources, record, blocks.tokenizer)
                text = json.dumps(record | {"made_from": origin}, indent=1) + "\n"
                (folder / manifest.MANIFEST).write_text(text, encoding="utf-8")
        except DataError:
            remove_blocks(output, unused=True)
            raise
    remove_blocks(output)
    return output / manifest.MANIFEST


def completed(
    sources: Sequence[CorpusSource],
    output: Path,
    tokenizer: TokenizerSource,
    rules: Rules,
    notes: dict[str, Any] | None = None,
) -> Path | None:
    """Return the path of the manifest if `output` is complete and has the same settings and inputs as this preparation.
    Otherwise return None.

    A scheduler may repeat a call that was killed after its folder was complete. The repeated call then succeeds.
    """
    path = output / manifest.MANIFEST
    try:
        origin = manifest.read_manifest(path).get("made_from")
    except DataError:
        return None
    if origin is None or origin != made_from(
        find_inputs(sources), settings_of(sources, tokenizer, rules, notes), rules
    ):
        return None
    write(f"{output}: is complete already, with the same settings and inputs")
    return path


def prepare_part(
    sources: Sequence[CorpusSource],
    output: Path,
    tokenizer: TokenizerSource,
    part: int,
    parts: int,
    rules: Rules | None = None,
    execution: Execution | None = None,
    notes: dict[str, Any] | None = None,
) -> str:
    """Do a part of the work of `prepare`, and return a message about the progress. Raises `DataError` as `prepare`
    does.

    If blocks are missing, this call builds the missing blocks with numbers that equal `part` modulo `parts`. If all
    blocks exist, this call writes shards. Any number of processes that call this function share this work.
    """
    rules, execution = rules or Rules(), execution or Execution()
    check(sources, rules)
    inputs = find_inputs(sources)
    sources = with_splits(sources, inputs, rules)
    if completed(sources, output, tokenizer, rules, notes) is not None:
        return f"{output}: is complete"
    require_new(output, DataError)
    try:
        with _work_is_kept(output):
            settings = settings_of(sources, tokenizer, rules, notes)
            blocks = Blocks(sources, inputs, output, tokenizer, rules, settings)
            if missing := blocks.missing():
                blocks.make([number for number in missing if number % parts == part], execution)
                return f"{blocks.folder}: {len(blocks) - len(blocks.missing())} of {len(blocks)} blocks are built"
            plan = blocks.plan(rules.shard_bytes)
            run_stages(plan, execution, part / parts, wait=False)
            done, tasks = len(plan.tasks) - len(STAGES[-1].missing(plan)), len(plan.tasks)
            return f"{plan.folder}: {done} of {tasks} tasks that write shards are done"
    except DataError:
        if not (output / manifest.MANIFEST).is_file():
            raise
        remove_blocks(output)  # another process completed the folder and removed the blocks
        return f"{output}: is complete"


def count_tasks(sources: Sequence[CorpusSource], rules: Rules, output: Path) -> tuple[int, int]:
    """Return (number of blocks, number of tasks that write shards) of a preparation that has not started yet. Raises
    `DataError` as `prepare` does.
    """
    check(sources, rules)
    require_new(output, DataError)
    units = find_inputs(sources).units
    blocks = cut([unit.size for _, unit in units])
    return len(blocks), len(divide(contents(blocks, units), rules.shard_bytes))


def _remove_other_plans(folder: Path) -> None:
    """Remove the shards that an interrupted command with other settings or inputs wrote."""
    for other in folder.parent.glob("shards-*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)


def _check_findings(
    sources: Sequence[CorpusSource], inputs: Inputs, shards: Sequence[WrittenShard], findings: Sequence[Findings]
) -> None:
    """Raise `DataError` for a source with too many faulty records or without a usable document."""
    written = Counter[int]()
    for shard in shards:
        written[shard.source] += shard.facts["documents"]
    for number, source in enumerate(sources):
        problems = findings[number].problems
        check_faults(source.spec.name, written[number], problems, source.max_faulty)
        if not written[number]:
            raise DataError(no_usable_document(source, inputs.of(number), problems))


@contextmanager
def _work_is_kept(output: Path) -> Iterator[None]:
    """Raise `DataError` if the body cannot write a file, for example because the disk is full. The message contains the
    folder of the finished blocks.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        blocks = blocks_folder(output)
        made = len(list(blocks.glob("*.block")))
        so_far = (
            f"{made} blocks are kept in {blocks}, and the same command continues from them"
            if made
            else "no finished block exists yet"
        )
        raise DataError(
            f"{output}: cannot be written ({reason}); free some space and run the same command again, or choose "
            f"another folder ({so_far})"
        ) from error
