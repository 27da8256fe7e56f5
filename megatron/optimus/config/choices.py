"""Options that are a choice: one enum each, whose values are the words of the command line and of files."""

from __future__ import annotations

from enum import Enum


class Normalization(str, Enum):
    RMSNORM = "rmsnorm"
    LAYERNORM_NONPARAMETRIC = "layernorm-nonparametric"  # OLMo-1B: no scale, no shift


class QKNormScope(str, Enum):
    FULL = "full"  # one statistic and one scale over all heads together: OLMoE, Mula
    HEAD = "head"  # a statistic per head, one scale of its width shared by all heads: Qwen3


class RotaryScaling(str, Enum):
    NONE = "none"
    LINEAR = "linear"  # every frequency divided by the factor (arXiv 2306.15595)
    LLAMA3 = "llama3"  # low frequencies divided, high ones kept, a ramp between (arXiv 2407.21783)


class ScoreFunction(str, Enum):
    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class LoadBalancing(str, Enum):
    NONE = "none"
    AUX_LOSS = "aux_loss"  # statistics of one micro-batch of one rank
    GLOBAL_AUX_LOSS = "global_aux_loss"  # statistics of the global batch


class TokenDispatcherType(str, Enum):
    ALLGATHER = "allgather"  # all-gather in, reduce-scatter out: the paper's
    ALLTOALL = "alltoall"  # each token once to every rank that has one of its experts
    HIERARCHICAL = "hierarchical"  # each token once to every such node, there once to every such rank
    SYMMETRIC = "symmetric"  # as alltoall, by GPUs of one node that read and write each other's memory
    AUTO = "auto"  # the fastest of these as measured at the start; with --deterministic allgather


class ExpertPlacement(str, Enum):
    CONTIGUOUS = "contiguous"  # rank r owns experts [r*E/EP, (r+1)*E/EP)
    INTERLEAVED = "interleaved"  # rank r owns experts r, r+EP, r+2*EP, ...


class PipelineSchedule(str, Enum):
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED_1F1B = "interleaved-1f1b"  # several chunks of layers per rank: a smaller bubble, more messages
    INTERLEAVED_ZERO_BUBBLE = "interleaved-zero-bubble"  # weight gradients fill the bubble (arXiv 2401.10241)
    ZBV = "zbv"  # zero bubble in V shape, two chunks per rank


class ContextCommunication(str, Enum):
    A2A = "a2a"  # Ulysses: all-to-all, each rank then has all positions of some heads
    P2P = "p2p"  # ring attention: keys and values go round, each rank keeps its positions


class Recompute(str, Enum):
    """Parts of a layer whose activations are recomputed in the backward; bits 1, 2 and 4 of arXiv 2604.00785."""

    MOE = "moe"  # the experts, shared ones too; the dense MLP in a layer without experts
    ATTENTION = "attention"
    NORM = "norm"


class Precision(str, Enum):
    BF16 = "bf16"
    FP32 = "fp32"


class OptimizerName(str, Enum):
    ADAM = "adam"  # AdamW: weight decay on the weights
    SGD = "sgd"
    MUON = "muon"  # for hidden matrices; AdamW for embeddings, output projection and norms
    LION = "lion"


class StateDtype(str, Enum):
    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"  # a scale for every 256 elements


class MuonLRAdjustment(str, Enum):
    ORIGINAL = "original"  # lr * sqrt(max(1, rows / columns))
    MATCH_RMS_ADAMW = "match_rms_adamw"  # lr * 0.2 * sqrt(max(rows, columns)): AdamW's lr and weight decay carry over


class LRDecayStyle(str, Enum):
    COSINE = "cosine"
    LINEAR = "linear"
    CONSTANT = "constant"
    INVERSE_SQUARE_ROOT = "inverse-square-root"  # lr * sqrt(warm-up steps / steps), not below min_lr
    WSD = "WSD"  # warm-up, stable, decay (arXiv 2404.06395): constant, then down in the last lr_wsd_decay_iters steps


class WSDDecayStyle(str, Enum):
    LINEAR = "linear"
    COSINE = "cosine"
    EXPONENTIAL = "exponential"  # halves as it goes
    MINUS_SQRT = "minus_sqrt"  # 1 - sqrt(progress) (arXiv 2405.18392)


class TokenizerType(str, Enum):
    HF = "HuggingFaceTokenizer"  # a tokenizer.json or a folder that holds one
    SENTENCEPIECE = "SentencePieceTokenizer"
    TIKTOKEN = "TikTokenizer"  # a .tiktoken file of ranks
    BYTE = "ByteLevelTokenizer"  # 256 bytes + end of document, no file


class Packing(str, Enum):
    NONE = "none"  # instances are windows of the stream of documents
    BEST_FIT = "best-fit"  # of whole documents, few of them cut


class Backend(str, Enum):
    AUTO = "auto"
    NCCL = "nccl"
    XCCL = "xccl"
    GLOO = "gloo"


class Device(str, Enum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    XPU = "xpu"
