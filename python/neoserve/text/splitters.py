"""How byte-level BPE vocabularies cut text into words before merging: one entry per ``tokenizer.ggml.pre``.

A GGUF file does not carry its splitter, only the splitter's name. A wrong one gives plausible but different tokens,
so an unknown name is refused rather than guessed. The names are those that llama.cpp's converter writes; the
expressions are those of the models' published tokenizer.json files. Where a published tokenizer also normalises to
NFC, so does the entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN35 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _TAIL
_NO_CONTRACTION = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + "+{0}|" + r"[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + "*{0}"
)
_SYMBOLS_WITH_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = _CASED.replace("{0}", "") + r"|\p{N}" + _SYMBOLS_WITH_SLASH + _TAIL
_GPT4O = _CASED.replace("{0}", _CONTRACTION + "?") + r"|\p{N}{1,3}" + _SYMBOLS_WITH_SLASH + _TAIL
_YOUTU = _CASED.replace("{0}", _CONTRACTION + "?") + r"|\p{N}" + _SYMBOLS_WITH_SLASH + _TAIL

_ASCII_SYMBOL = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_KANA_AND_HAN = "[一-龥\u3040-ゟ゠-ヿ]+"
_DEEPSEEK3 = (
    _ASCII_SYMBOL + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_HAN = "[一-龥ࠀ-一가-\ud7ff]+"
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅ"
    "ὐ-ὗὙὛὝ\u1f5f-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎ"
    "ꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_EXAONE_MOE = (
    _CONTRACTION
    + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED_CODER = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True, slots=True, kw_only=True)
class Splitter:
    """One pre-tokenizer. ``steps`` run in order, each cutting the pieces that the last one left.

    A step is a regular expression (matches and the text between them become pieces), "digits" (each digit
    alone), "digit_runs" or "punctuation" (runs of punctuation together). ``gpt2_words`` ends with GPT-2's own
    expression. ``ignore_merges``: a piece that is a token as a whole is taken without merging. ``add_bos`` is
    the default where the file does not say.
    """

    steps: tuple[str, ...] = ()
    gpt2_words: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def pre_tokenizer(self) -> Any:
        """The same as a pre-tokenizer of the ``tokenizers`` library."""
        parts = [_step(step) for step in self.steps]
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2_words))
        return pre_tokenizers.Sequence(parts)


def _step(step: str) -> Any:
    if step == "digits":
        return pre_tokenizers.Digits(individual_digits=True)
    if step == "digit_runs":
        return pre_tokenizers.Digits(individual_digits=False)
    if step == "punctuation":
        return pre_tokenizers.Punctuation(behavior="contiguous")
    return pre_tokenizers.Split(Regex(step), behavior="isolated")


_GPT2_WORDS = Splitter(gpt2_words=True)
_DIGITS_THEN_WORDS = Splitter(steps=("digits",), gpt2_words=True)
_LLAMA3_BPE = Splitter(steps=(_LLAMA3,), ignore_merges=True, add_bos=True)
_DEEPSEEK3_BPE = Splitter(steps=(r"\p{N}{1,3}", _KANA_AND_HAN, _DEEPSEEK3))
_QWEN2_BPE = Splitter(steps=(_QWEN2,), nfc=True)
_GPT4O_BPE = Splitter(steps=(_GPT4O,))

_GROUPS: tuple[tuple[tuple[str, ...], Splitter], ...] = (
    (("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3_BPE),
    (("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Splitter(steps=(_LLAMA3,))),
    (("qwen2", "deepseek-r1-qwen"), _QWEN2_BPE),
    (("stablelm2", "megrez", "hunyuan", "solar-open", "grok-2", "kormo"), Splitter(steps=(_QWEN2,))),
    (("ufakzeka",), Splitter(steps=(_NO_CONTRACTION,))),
    (("laguna",), Splitter(steps=(r"[^\n]+|[\n]+", _QWEN2))),
    (("qwen35",), Splitter(steps=(_QWEN35,), nfc=True)),
    (("tekken",), Splitter(steps=(_TEKKEN,), ignore_merges=True, add_bos=True)),
    (("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O_BPE),
    (("tiny_aya", "cohere2moe"), Splitter(steps=(r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))),
    (
        ("youtu",),
        Splitter(
            steps=("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _KANA_AND_HAN, _YOUTU), ignore_merges=True
        ),
    ),
    (("gpt-2", "phi-2", "jais", "trillion", "granite-docling", "gigachat", "mellum", "exaone4"), _GPT2_WORDS),
    (("mpt", "olmo"), Splitter(gpt2_words=True, nfc=True)),
    (("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS_THEN_WORDS),
    (("command-r",), Splitter(steps=("digits",), gpt2_words=True, nfc=True)),
    (("falcon",), Splitter(steps=("punctuation", _GPT2, "digit_runs", "[0-9][0-9][0-9]"))),
    (
        ("deepseek-llm",),
        Splitter(
            steps=(
                r"[\r\n]",
                _DEEPSEEK_LETTERS,
                r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
                # The published "\s+$" tries every start of a run of blanks; the look-behind keeps it linear.
                r"(?<!\s)\s+$",
                _DEEPSEEK_HAN,
                "digits",
            )
        ),
    ),
    (("deepseek-coder",), Splitter(steps=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_HAN, "digits"))),
    (("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3_BPE),
    (("bailingmoe", "bailingmoe2", "llada-moe"), Splitter(steps=(_BAILING,))),
    (("seed-coder",), Splitter(steps=(_SEED_CODER,))),
    (("exaone-moe",), Splitter(steps=(_EXAONE_MOE,))),
    (("bloom", "gpt3-finnish", "poro-chat"), Splitter(steps=(_BLOOM,))),
    (("viking",), Splitter(steps=(_BLOOM, "digits"))),
)

SPLITTERS: Mapping[str, Splitter] = {name: splitter for names, splitter in _GROUPS for name in names}
