"""A tiny random model that can be served: a golden tiny checkpoint with a tokenizer and a chat template beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from .api_harness import TEMPLATE

_TINY = Path(__file__).parents[1] / "models" / "golden" / "tiny" / "llama"
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def make_tiny_model(folder: Path) -> Path:
    """Writes the model into ``folder``; printable ASCII and the newline are its vocabulary."""
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(_TINY / name, folder / name)
    characters = [chr(code) for code in range(ord("!"), ord("~") + 1)] + ["Ġ", "Ċ"]
    vocabulary = {text: index for index, text in enumerate([*SPECIAL, *characters])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
