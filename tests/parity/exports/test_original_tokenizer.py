"""transformers reads an export with the original model's tokenizer files as it reads the original."""

from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig

from megatron_coca.checkpoints.exporting import export
from megatron_coca.checkpoints.importing import import_checkpoint
from tests.parity.original import original_folder

TEXTS = ["def a function", "<|im_start|>return<|im_end|></s>", ""]


def test_the_tokenizer_behaves_as_the_original(tmp_path: Path) -> None:
    source = original_folder(tmp_path)
    save = import_checkpoint(source, tmp_path / "save", {"pos_emb": "coca"}).folder
    kept = export(save, tmp_path / "kept", tokenizer=source).folder
    theirs, ours = (AutoTokenizer.from_pretrained(folder, trust_remote_code=True) for folder in (source, kept))
    chat = [{"role": "user", "content": "return the value"}]
    for text in TEXTS:
        assert ours(text).input_ids == theirs(text).input_ids
    assert ours(TEXTS[0]).input_ids[0] == 0 and ours(TEXTS[1]).input_ids[1] == 2, "BOS, and a symbol that is one token"
    assert ours.apply_chat_template(chat, tokenize=False) == "<|im_start|>return the value<|im_end|>"
    generation = GenerationConfig.from_pretrained(kept)
    assert generation.eos_token_id == [1, 3] and generation.do_sample and generation.temperature == 0.6
