# Optimus for NVIDIA GPUs, with the Hopper kernels of csrc/cuda compiled in. This image has not been built.
#
#     docker build -f tools/containers/cuda.Dockerfile -t optimus .            from the root of the source tree
#     docker run --gpus all --ipc host --ulimit memlock=-1 -it optimus
#
# CUDA_IMAGE and TORCH_CUDA must name the same major version of CUDA: nvcc compiles against torch's headers.
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04
FROM ${CUDA_IMAGE}
ARG TORCH_CUDA=cu130

# Triton compiles its launchers at run time, so g++ and Python's headers stay in the image.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        g++ git python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/venv && pip install --upgrade pip "setuptools>=77" wheel ninja

# torch and DeepSpeed before the source tree: a change of the source does not install them again.
COPY requirements.txt /tmp/requirements.txt
RUN grep '^torch==' /tmp/requirements.txt \
        | xargs pip install --index-url "https://download.pytorch.org/whl/${TORCH_CUDA}" \
    && python -c "import torch; assert torch.version.cuda, torch.__version__" \
    && grep -E '^(deepspeed|numpy|safetensors|xxhash|pyyaml|tokenizers)==' /tmp/requirements.txt > /tmp/pinned.txt \
    && pip install -r /tmp/pinned.txt

COPY . /opt/optimus
WORKDIR /opt/optimus
# No GPU is there while the image is built, so its architecture is named: 9.0 is Hopper.
RUN TORCH_CUDA_ARCH_LIST=9.0 pip install --no-build-isolation ".[tui,tensorboard,hf,plot,sentencepiece,tiktoken,parquet]" \
    && cd / && python -c "import torch, megatron.optimus.ops._C; assert hasattr(torch.ops.optimus, 'cuda_moe_mlp')"

WORKDIR /workspace
CMD ["bash"]
