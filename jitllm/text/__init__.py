"""Text at the rim: a GGUF vocabulary becomes a tokenizer once, at conversion; ids become text as
they come; messages become a prompt. No jax here.

`build.build_tokenizer` makes, at conversion, what `Tokenizer` reads.
"""

from jitllm.text.chat import ChatTemplate
from jitllm.text.stream import StopFilter, StreamDecoder
from jitllm.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "StopFilter", "StreamDecoder", "Tokenizer"]
