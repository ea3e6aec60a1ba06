"""How byte-level BPE vocabularies cut a text into words before merging: one table of names.

A pre-tokenizer is a list of patterns applied one after the other, each to what the last one left:
what a pattern matches is a word, and so is what lies between two matches. The patterns are those
that llama.cpp applies for the name in `tokenizer.ggml.pre` (src/llama-vocab.cpp and, for GPT-2's
and Llama 3's, src/unicode.cpp), in the syntax of Oniguruma, which `tokenizers` uses.
"""

from dataclasses import dataclass, replace

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_OTHERS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_OTHERS}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_OTHERS}"

# A word of the vocabularies that split at case: upper-case letters, then lower-case ones.
_UPPER, _LOWER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASED_OTHERS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"

# The letters that DeepSeek's first tokenizer lists one by one.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6Ø-\u00f6ø-ƺƼ-ƿ\u01c4-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿ\u0386\u0388-\u038a\u038c"
    "\u038e-ΡΣ-\u03f5Ϸ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ\u1e00-\u1f15\u1f18-\u1f1d\u1f20-"
    "\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-"
    "\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-"
    "\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149ⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇ"
    "Ꞌ-ꞎꭰ-ꮿ\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
# llama.cpp reads every white space outside ASCII as a vertical tab, so none is a letter here.
_CJK = "[\\u0800-\\u9fa5\\uac00-\\ud7ff&&[^\\s]]+"
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)


@dataclass(frozen=True)
class PreTokenizer:
    """The words of a text, and two habits that go with the name."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    """A word that is a token is that token, whatever the merges say."""
    add_bos: bool = False
    """Whether a text begins with BOS where the file does not say."""


_DEFAULT = PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
_GPT2_WORDS = PreTokenizer((_GPT2,))
_DIGITS_APART = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3_WORDS = PreTokenizer((_LLAMA3,))
_LLAMA3_WHOLE = replace(_LLAMA3_WORDS, whole_words=True, add_bos=True)
_QWEN2_WORDS = PreTokenizer((_QWEN2,))
_GPT4O = PreTokenizer((rf"{_CASED % ((_CONTRACTIONS + '?',) * 2)}|\p{{N}}{{1,3}}|{_CASED_OTHERS}",))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _DEFAULT,
    "command-r": _DIGITS_APART,
    "dbrx": _LLAMA3_WORDS,
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001\u3002]+",
            r"\s+\z",
            _CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-r1-qwen": _QWEN2_WORDS,
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u30ff]+", _DEEPSEEK3_WORDS)),
    "exaone": _DIGITS_APART,
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "falcon3": _LLAMA3_WHOLE,
    "gpt-2": _GPT2_WORDS,
    "gpt-4o": _GPT4O,
    "lfm2": _LLAMA3_WHOLE,
    "llama-bpe": _LLAMA3_WHOLE,
    "llama-v3": _LLAMA3_WHOLE,
    "llama3": _LLAMA3_WHOLE,
    "llama4": _GPT4O,
    "megrez": _QWEN2_WORDS,
    "minerva-7b": _DIGITS_APART,
    "mpt": _GPT2_WORDS,
    "olmo": _GPT2_WORDS,
    "phi-2": _GPT2_WORDS,
    "pixtral": _LLAMA3_WHOLE,
    "qwen2": _QWEN2_WORDS,
    "refact": _DIGITS_APART,
    "smaug-bpe": _LLAMA3_WORDS,
    "smollm": _DIGITS_APART,
    "stablelm2": _QWEN2_WORDS,
    "starcoder": _DIGITS_APART,
    "tekken": PreTokenizer(
        (rf"{_CASED % ('', '')}|\p{{N}}|{_CASED_OTHERS}",), whole_words=True, add_bos=True
    ),
    "trillion": _GPT2_WORDS,
}
"""Name in `tokenizer.ggml.pre` -> how it cuts. What is not here is refused unless forced."""

LINES = PreTokenizer((r"[^\n]+|\n+",), add_bos=True)
"""Gemma 4's: merges run over whole lines, on plain UTF-8."""
