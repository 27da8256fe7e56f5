"""The decoder of layers/ and moe/: Mula, OLMo, OLMoE, Llama, Qwen, Mixtral and Granite."""

from megatron.optimus.config.family import Family
from megatron.optimus.models.huggingface.architectures import ARCHITECTURES


class DecoderFamily(Family):
    architectures = tuple(ARCHITECTURES.values())


FAMILY = DecoderFamily()
