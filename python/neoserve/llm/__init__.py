"""The Python interface: a model in this process, for whole batches (LLM) or for streams (AsyncLLM)."""

from neoserve.llm.asynchronous import AsyncLLM
from neoserve.llm.model import Messages, Prompt
from neoserve.llm.offline import LLM
from neoserve.llm.output import RequestOutput
from neoserve.text.output import TextDelta
from neoserve.types.sampling import SamplingParams

__all__ = ["LLM", "AsyncLLM", "Messages", "Prompt", "RequestOutput", "SamplingParams", "TextDelta"]
