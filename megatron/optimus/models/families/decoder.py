"""The decoder of layers/ and moe/: Mula, OLMo, OLMoE, Llama, Qwen, Mixtral and Granite."""

from megatron.optimus.config.family import Family
from megatron.optimus.models.huggingface.architectures import ARCHITECTURES


class DecoderFamily(Family):
    """The models that ``Decoder`` computes as it is, with their Hugging Face architectures."""

    architectures = tuple(ARCHITECTURES.values())


FAMILY = DecoderFamily()
