"""The enums of options; their values are what the command line and configuration files contain."""

from __future__ import annotations

from enum import Enum


class Normalization(str, Enum):
    """Values of ``normalization``: the norm before each part of a layer and before the head."""

    RMSNORM = "rmsnorm"
    LAYERNORM_NONPARAMETRIC = "layernorm-nonparametric"  # OLMo-1B: no scale, no shift


class QKNormScope(str, Enum):
    """Values of ``qk_layernorm_scope``: what one norm of queries and keys spans."""

    FULL = "full"  # mean square and scale over all heads together: OLMoE, Mula
    HEAD = "head"  # mean square of each head, one scale shared by all heads: Qwen3


class RotaryScaling(str, Enum):
    """Values of ``rotary_scaling``: how rotary frequencies are changed for longer sequences."""

    NONE = "none"
    LINEAR = "linear"  # every frequency divided by the factor (arXiv 2306.15595)
    LLAMA3 = "llama3"  # low frequencies divided, high ones kept, interpolated between (arXiv 2407.21783)


class ScoreFunction(str, Enum):
    """Values of ``moe_router_score_function``: how the router's logits become scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class LoadBalancing(str, Enum):
    """Values of ``moe_router_load_balancing_type``: the load-balancing loss of the router."""

    NONE = "none"
    AUX_LOSS = "aux_loss"  # token fractions of one micro-batch on one rank
    GLOBAL_AUX_LOSS = "global_aux_loss"  # token fractions of the global batch


class TokenDispatcherType(str, Enum):
    """Values of ``moe_token_dispatcher_type``: how tokens reach the ranks of their experts."""

    ALLGATHER = "allgather"  # all-gather before the experts, reduce-scatter after: the paper's
    ALLTOALL = "alltoall"  # sends a token once to every rank that has one of its experts
    HIERARCHICAL = "hierarchical"  # sends a token once to every such node, and there once to every such rank
    SYMMETRIC = "symmetric"  # as alltoall, through symmetric memory of the GPUs of one node
    AUTO = "auto"  # the fastest of these, measured at the start; with --deterministic allgather


class ExpertPlacement(str, Enum):
    """Values of ``moe_expert_placement``: which experts an expert-parallel rank owns, of E over EP ranks."""

    CONTIGUOUS = "contiguous"  # rank r owns experts [r*E/EP, (r+1)*E/EP)
    INTERLEAVED = "interleaved"  # rank r owns experts r, r+EP, r+2*EP, ...


class PipelineSchedule(str, Enum):
    """Values of ``pipeline_schedule``: the order of a pipeline's forwards and backwards."""

    ONE_F_ONE_B = "1f1b"
    INTERLEAVED_1F1B = "interleaved-1f1b"  # several model chunks per rank: a smaller bubble, more messages
    INTERLEAVED_ZERO_BUBBLE = "interleaved-zero-bubble"  # weight gradients fill the bubble (arXiv 2401.10241)
    ZBV = "zbv"  # zero bubble with two model chunks per rank in V shape


class ContextCommunication(str, Enum):
    """Values of ``cp_comm_type``: how context-parallel ranks exchange keys and values."""

    A2A = "a2a"  # Ulysses: an all-to-all gives each rank all positions of some heads
    P2P = "p2p"  # ring attention: keys and values pass through all ranks


class Recompute(str, Enum):
    """Modules of a layer whose activations are recomputed in the backward; bits 1, 2 and 4 of arXiv 2604.00785."""

    MOE = "moe"  # experts and shared experts, or the dense MLP of a layer without experts
    ATTENTION = "attention"
    NORM = "norm"


class Precision(str, Enum):
    """Values of ``params_dtype``: the dtype in which the model computes."""

    BF16 = "bf16"
    FP32 = "fp32"


class OnNan(str, Enum):
    """What a run does after several skipped updates in a row, whose gradients were not finite or far too large."""

    STOP = "stop"
    SKIP = "skip"
    ROLLBACK = "rollback"


class OnLossSpike(str, Enum):
    """Values of ``on_loss_spike``: what follows a loss spike."""

    NONE = "none"
    ROLLBACK = "rollback"


class Float8(str, Enum):
    """Values of ``fp8``: which matrix products are computed in 8-bit floating point."""

    NONE = "none"
    HYBRID = "hybrid"  # products of projections, MLPs and experts: e4m3 forward, e5m2 gradients


class KernelLibrary(str, Enum):
    """The library whose kernels compute norms or the optimizer's step."""

    OPTIMUS = "optimus"  # ours and torch's
    APEX = "apex"


OPTIMIZER_LIBRARY = "pytorch_optimizer:"  # the package, before the name of one of its classes


class OptimizerName(str, Enum):
    """An optimizer is ("name", its states an element, whether it is for hidden matrices and AdamW for the others).

    Of one for matrices only the states that lie in flat shards count; planner/matrix_states.py counts the others.
    ``pytorch_optimizer:Lion``, for example, is a member of that value, made when it is first asked for.
    """

    num_states: int
    is_for_matrices: bool

    def __new__(cls, value: str, num_states: int = 2, is_for_matrices: bool = False) -> OptimizerName:
        name = str.__new__(cls, value)
        name._value_, name.num_states, name.is_for_matrices = value, num_states, is_for_matrices
        return name

    @property
    def keeps_flat_states(self) -> bool:
        """Whether it keeps states as shards of elements, which may be in fewer bits."""
        return self.num_states > 0

    ADAM = "adam", 2  # AdamW: decoupled weight decay
    SGD = "sgd", 1
    MUON = "muon", 1, True
    LION = "lion", 1
    NORMUON = "normuon", 1, True
    SOAP = "soap", 0, True
    SHAMPOO = "shampoo", 0, True
    GALORE = "galore", 0, True
    DION = "dion", 0, True
    ADAFACTOR = "adafactor", 0  # beside a number for each row and column
    ADEMAMIX = "ademamix", 3
    ADOPT = "adopt", 2
    CAUTIOUS_ADAMW = "cautious-adamw", 2
    LAMB = "lamb", 2
    LARS = "lars", 1
    MARS = "mars", 3
    SCHEDULE_FREE_ADAMW = "schedule-free-adamw", 2
    SCHEDULE_FREE_SGD = "schedule-free-sgd", 1
    SOPHIA = "sophia", 2
    LIBRARY = "pytorch_optimizer:NAME", 2  # any element-wise one of that package; its states are counted when asked

    @classmethod
    def _missing_(cls, value: object) -> OptimizerName | None:
        if not isinstance(value, str) or not value.removeprefix(OPTIMIZER_LIBRARY).isidentifier():
            return None
        if not value.startswith(OPTIMIZER_LIBRARY):
            return None
        member = str.__new__(cls, value)
        member._name_ = member._value_ = value
        member.num_states, member.is_for_matrices = cls.LIBRARY.num_states, False
        cls._value2member_map_[value] = member  # the same object every time
        return member

    @property
    def is_schedule_free(self) -> bool:
        """Whether it averages weights in the place of a learning-rate schedule."""
        return self in (OptimizerName.SCHEDULE_FREE_ADAMW, OptimizerName.SCHEDULE_FREE_SGD)

    @property
    def is_of_library(self) -> bool:
        """Whether it is a class of pytorch_optimizer."""
        return self.value.startswith(OPTIMIZER_LIBRARY)


class OptimizerStateDtype(str, Enum):
    """Values of ``optimizer_state_dtype``: the dtype in which optimizer states are kept."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"  # with a scale for every 256 elements

    @property
    def element_bytes(self) -> float:
        """Bytes of an element, its part of the scale included."""
        return {"fp32": 4, "bf16": 2, "int8": 1 + 4 / 256}[self.value]


class MuonLRAdjustment(str, Enum):
    """Values of ``muon_adjust_lr_fn``: how the rate of a matrix depends on its shape."""

    ORIGINAL = "original"  # lr * sqrt(max(1, rows / columns))
    MATCH_RMS_ADAMW = "match_rms_adamw"  # lr * 0.2 * sqrt(max(rows, columns)): AdamW's lr and weight decay carry over


class Parametrization(str, Enum):
    """Values of ``parametrization``: how initial values, rates and decay depend on the model's size."""

    STANDARD = "standard"  # the same initial values, rate and decay for every tensor
    MUP = "mup"  # they depend on the width, as config/parametrization.py says
    COMPLETEP = "completep"  # and on the depth


class ShampooGraft(str, Enum):
    """Values of ``shampoo_graft``: the optimizer whose norm the update of a matrix gets."""

    RMSPROP = "rmsprop"
    SGD = "sgd"


class LRBatchRule(str, Enum):
    """Values of ``lr_batch_rule``: how a resumed run with another batch size changes its rates."""

    NONE = "none"
    SQRT = "sqrt"
    LINEAR = "linear"


class LRDecayStyle(str, Enum):
    """Values of ``lr_decay_style``: the schedule of the rate after the warm-up."""

    COSINE = "cosine"
    LINEAR = "linear"
    CONSTANT = "constant"
    INVERSE_SQUARE_ROOT = "inverse-square-root"  # lr * sqrt(warm-up steps / steps), not below min_lr
    RANGE_TEST = "range-test"  # exponential rise from min_lr to lr (arXiv 1506.01186): `optimus lr-find`
    WSD = "WSD"  # warm-up, stable, decay (arXiv 2404.06395): constant, then a decay over lr_wsd_decay_iters steps


class WSDDecayStyle(str, Enum):
    """Values of ``lr_wsd_decay_style``: the shape of the decay at the end of WSD."""

    LINEAR = "linear"
    COSINE = "cosine"
    EXPONENTIAL = "exponential"  # 2 * 0.5**progress - 1
    MINUS_SQRT = "minus_sqrt"  # 1 - sqrt(progress) (arXiv 2405.18392)


class TokenizerType(str, Enum):
    """Values of ``tokenizer_type``: the library that a tokenizer is of."""

    HF = "HuggingFaceTokenizer"  # a tokenizer.json, or a folder with one
    SENTENCEPIECE = "SentencePieceTokenizer"
    TIKTOKEN = "TikTokenizer"  # a .tiktoken file
    BYTE = "ByteLevelTokenizer"  # 256 bytes + end of document, no file


class SplitBy(str, Enum):
    """Values of ``split_by``: what assigns a document to training, validation or test."""

    AUTO = "auto"  # by hash where preprocessing has prepared every file for it, else by position
    HASH = "hash"  # of a document's text: equal documents are in one split, whatever the order of a file
    POSITION = "position"  # in the file


class Packing(str, Enum):
    """Values of ``packing``: how documents fill samples."""

    NONE = "none"  # samples are windows of the token stream
    BEST_FIT = "best-fit"  # samples are packed with whole documents, few of which are split


class DistributedBackend(str, Enum):
    """Values of ``distributed_backend``: the backend of torch.distributed."""

    AUTO = "auto"
    NCCL = "nccl"
    XCCL = "xccl"
    GLOO = "gloo"
    CCL = "ccl"  # of the module oneccl_bindings_for_pytorch, where torch has no xccl


class Device(str, Enum):
    """Values of ``device``: the kind of device that a rank computes on."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    XPU = "xpu"
    MPS = "mps"  # an Apple GPU: one process, without kernels of ours
