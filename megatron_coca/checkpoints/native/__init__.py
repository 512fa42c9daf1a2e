"""Native checkpoints: one folder for each step."""

from megatron_coca.checkpoints.files import describe, files, read_json, write_json
from megatron_coca.checkpoints.native.meta import META, AdaptedModel, adapted_model, read_meta
from megatron_coca.checkpoints.native.read import (
    CONFIG,
    EVERYTHING,
    FORMAT,
    LATEST,
    LOCK,
    MANIFEST,
    QUARANTINE,
    RNG,
    STATE,
    TOKENIZER,
    WEIGHTS,
    WEIGHTS_ONLY,
    begun_steps,
    checked_manifest,
    expected_digests,
    is_step_folder,
    locate,
    parse_step,
    read_latest,
    require_run_state,
    state_files,
    step_folder,
    step_of,
    steps,
    unlisted,
    verify,
)
from megatron_coca.checkpoints.native.write import (
    abandon,
    begin,
    code_versions,
    commit,
    partial_folder,
    prune,
    set_aside,
    superseded,
    sweep,
)
from megatron_coca.support.atomic_write import flush
