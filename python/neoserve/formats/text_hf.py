"""What a Hugging Face checkpoint folder says about text: generation defaults, tokenizer, chat templates."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from neoserve.formats.fields import Fields, optional_json
from neoserve.types.errors import CheckpointError
from neoserve.types.model import GenerationDefaults, TokenizerSource

GENERATION_FILE: Final = "generation_config.json"
TOKENIZER_FILE: Final = "tokenizer.json"
_TEMPLATE_FILE: Final = "chat_template.jinja"
_TEMPLATE_FOLDER: Final = "additional_chat_templates"
_TEMPLATE_JSON: Final = ("chat_template.json", "tokenizer_config.json", "processor_config.json")
_MAX_TEMPLATE_BYTES: Final = 4 << 20

# Fields of generation_config.json that would change the output and are not honoured, with their neutral values.
_IGNORED: Final[Mapping[str, tuple[object, ...]]] = {
    "bad_words_ids": (None, []),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "sequence_bias": (None, {}),
    "no_repeat_ngram_size": (None, 0),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "num_beams": (None, 1),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
}

_log = logging.getLogger(__name__)


def read_hf_generation(folder: Path, config: Mapping[str, object], vocab_size: int) -> GenerationDefaults:
    """Sampling defaults and every id that ends generation.

    As in transformers, ``eos_token_id`` comes from generation_config.json, else from config.json, and
    ``do_sample: false`` means greedy (temperature 0, the other fields silent). Raises CheckpointError naming a field
    that is out of range, an EOS id outside the vocabulary among them.
    """
    fields = Fields(optional_json(folder / GENERATION_FILE), GENERATION_FILE)
    eos = fields.token_ids("eos_token_id", vocab_size)
    if not eos:
        eos = Fields(config, "config.json").token_ids("eos_token_id", vocab_size)
    for name, neutral in _IGNORED.items():
        if fields.get(name) not in neutral:
            _log.warning("%s: %s is %r; it is not applied", GENERATION_FILE, name, fields.get(name))
    if not fields.flag("do_sample", True):
        return GenerationDefaults(eos_token_ids=eos, temperature=0.0)
    return GenerationDefaults(
        eos_token_ids=eos,
        temperature=fields.optional_number("temperature", 0.0, 100.0),
        top_k=fields.optional_integer("top_k", 0, 2**31 - 1),
        top_p=fields.optional_positive("top_p", 1.0),
        min_p=fields.optional_number("min_p", 0.0, 1.0),
        repetition_penalty=fields.optional_positive("repetition_penalty", 100.0),
    )


def read_hf_tokenizer(folder: Path) -> TokenizerSource:
    """The tokenizer files of a folder. Without a tokenizer.json, ``tokenizer_json`` is None: the text layer refuses.

    ``special_tokens_map.json`` fills in what tokenizer_config.json leaves out. Chat templates are taken from the first
    of: chat_template.jinja, chat_template.json, tokenizer_config.json, processor_config.json; named ones are added
    from additional_chat_templates/NAME.jinja and from lists of {name, template}.
    """
    config = optional_json(folder / "special_tokens_map.json") | optional_json(folder / "tokenizer_config.json")
    templates, origin = _chat_templates(folder)
    tokenizer = folder / TOKENIZER_FILE
    if not tokenizer.is_file():
        others = [name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (folder / name).is_file()]
        _log.warning("%s is missing%s", TOKENIZER_FILE, f"; {others[0]} alone is not read" if others else "")
    return TokenizerSource(
        tokenizer_json=str(tokenizer) if tokenizer.is_file() else None,
        tokenizer_config=config,
        chat_templates=templates,
        chat_template_origin=origin,
        digest=_digest(folder, templates),
    )


def _chat_templates(folder: Path) -> tuple[dict[str, str], str | None]:
    templates: dict[str, str] = {}
    origin = None
    if (folder / _TEMPLATE_FILE).is_file():
        templates["default"] = _read_text(folder / _TEMPLATE_FILE)
        origin = _TEMPLATE_FILE
    if (folder / _TEMPLATE_FOLDER).is_dir():
        for path in sorted((folder / _TEMPLATE_FOLDER).glob("*.jinja")):
            templates.setdefault(path.stem, _read_text(path))
            origin = origin or f"{_TEMPLATE_FOLDER}/{path.name}"
    for name in _TEMPLATE_JSON:
        for key, text in _json_templates(optional_json(folder / name).get("chat_template"), name).items():
            if key not in templates:
                templates[key] = text
                origin = name if key == "default" else origin or name
    return templates, origin


def _json_templates(value: object, file: str) -> dict[str, str]:
    """``chat_template`` as one string, as an object of names, or as a list of {name, template}."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        entries = [item if isinstance(item, dict) else {} for item in value]
        value = {entry.get("name"): entry.get("template") for entry in entries}
    if not isinstance(value, dict) or not all(isinstance(item, str) for pair in value.items() for item in pair):
        raise CheckpointError(f"{file}: chat_template must be a string or a list of objects with name and template")
    return value


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
        if len(data) > _MAX_TEMPLATE_BYTES:
            raise CheckpointError(f"{path.name}: is {len(data)} bytes; at most {_MAX_TEMPLATE_BYTES} are read")
        return data.decode("utf-8")
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path.name}: is not UTF-8 text (byte {error.start})") from None


def _digest(folder: Path, templates: Mapping[str, str]) -> str:
    digest = hashlib.sha256(b"hf tokenizer")
    for name in (TOKENIZER_FILE, "tokenizer_config.json", "special_tokens_map.json"):
        path = folder / name
        data = path.read_bytes() if path.is_file() else b""
        digest.update(f"\n{name} {len(data)}\n".encode())
        digest.update(data)
    for key, text in sorted(templates.items()):
        digest.update(f"\n{key} {len(text)}\n{text}".encode())
    return digest.hexdigest()
