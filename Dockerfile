# One node of a run. docs/launch.md says what NCCL needs of a container.
#   docker build -t shardtune .
# The wheels of torch bring CUDA, cuDNN and NCCL. The host has NVIDIA's driver (R580 or newer) and its container toolkit.
FROM python:3.11-slim-bookworm

# gcc: compiled layers are built while the run starts. The others: NCCL loads them where there is InfiniBand or RoCE.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libibverbs1 ibverbs-providers librdmacm1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/shardtune

# Before the code, whose changes then install nothing anew.
COPY requirements.txt ./
RUN pip install --no-cache-dir -r requirements.txt

COPY pyproject.toml train_fsdp.py config.yaml launch_node0.sh launch_node1.sh ./
COPY shardtune shardtune
COPY distTest distTest
COPY examples examples
COPY docs docs
RUN pip install --no-cache-dir --no-deps -e .

# A run: ./launch_node0.sh [arguments of train_fsdp.py].
CMD ["shardtune"]
