"""What a run is, decided once: its ranks, rows and dtypes, and where its states lie.

This module has plain data and no torch: agents load it. No other module reads these keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardtune.config import Config, ParallelConfig
from shardtune.errors import divisors_text

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Each degree divides the ranks that the degrees before it leave.
_CHAINS = (
    ("stages", "replicate", "expert"),
    ("stages", "replicate", "tensor"),
    ("stages", "context"),
)


@dataclass(frozen=True)
class Layout:
    """The ranks of a run, how they divide the model and a step's rows, and its dtypes.

    All ranks are in `stages` parts, each of these in `replicate` copies of the stage's weights, and
    each copy in shards. `expert` consecutive ranks of a copy share one set of experts. `context`
    consecutive ranks of a stage share each row, or `tensor` of a copy, which also share matrices.
    The degrees have their keys' names.
    """

    ranks: int
    is_gpu: bool = False
    stages: int = 1
    replicate: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    micro_batch_size: int = 1  # rows
    micro_batches: int = 1  # per step and data rank
    max_length: int = 1  # tokens of a row
    compute_dtype: str = "float32"  # forward, backward and frozen weights
    master_dtype: str = "float32"  # trained weights and their updates
    reduce_dtype: str = "float32"
    is_lora: bool = False
    offloads: bool = False  # masters, moments and gradients are in host memory
    checkpointing: str = "none"
    packing: bool = True
    attention: str = "auto"
    optimizer: str = "adamw"

    @classmethod
    def of(
        cls,
        config: Config,
        ranks: int = 1,
        is_gpu: bool = False,
        native_dtype: str | None = None,
    ) -> Layout:
        """Decide how a configuration runs on `ranks` ranks.

        `native_dtype`: what `model.compute_dtype=auto` is; None: bfloat16 on GPUs, else float32.
        """
        model, train, is_lora = config.model, config.train, config.lora.rank is not None
        compute_dtype: str = model.compute_dtype
        if compute_dtype == "auto":
            compute_dtype = native_dtype or ("bfloat16" if is_gpu else "float32")
        return cls(
            ranks,
            is_gpu,
            **dict(config.parallel),
            micro_batch_size=train.micro_batch_size,
            micro_batches=train.gradient_accumulation_steps,
            max_length=config.data.max_length,
            compute_dtype=compute_dtype,
            master_dtype="float32" if is_lora else model.master_dtype,
            reduce_dtype=model.reduce_dtype,
            is_lora=is_lora,
            # States of adapters are small, and a CPU has no other memory.
            offloads=config.optimizer.offload and is_gpu and not is_lora,
            checkpointing=model.activation_checkpointing,
            packing=config.data.packing,
            attention=model.attention,
            optimizer="adamw" if is_lora else config.optimizer.name,
        )

    @classmethod
    def divided(cls, ranks: int, degrees: Mapping[str, Any]) -> Layout:
        """Return the layout of `ranks` ranks with these degrees, by the names of their keys.

        A checkpoint of another version may have degrees that this one does not know.
        """
        known = {key: n for key, n in degrees.items() if key in ParallelConfig.model_fields}
        return replace(cls(ranks), **known)

    @property
    def stage_ranks(self) -> int:
        """The ranks of each stage, which reduce each of its gradients."""
        return self.ranks // self.stages

    @property
    def shards(self) -> int:
        """The number of shards of each weight, one per rank of a replica."""
        return self.stage_ranks // self.replicate

    @property
    def expert_shards(self) -> int:
        """The number of shards of each expert within a replica."""
        return self.shards // self.expert

    @property
    def tensor_shards(self) -> int:
        """The number of shards of each part of a matrix that `tensor` ranks share."""
        return self.shards // self.tensor

    @property
    def row_ranks(self) -> int:
        """How many consecutive ranks share each row."""
        return self.context * self.tensor

    @property
    def row_key(self) -> str:
        """The key that lets ranks share rows."""
        return "parallel.tensor" if self.tensor > 1 else "parallel.context"

    @property
    def data_ranks(self) -> int:
        """The number of parts of a global batch. Ranks that share rows are one data rank."""
        return self.stage_ranks // self.row_ranks

    @property
    def rows_per_micro_batch(self) -> int:
        return self.data_ranks * self.micro_batch_size

    @property
    def rows_per_step(self) -> int:
        """The rows of a global batch, the effective batch size."""
        return self.rows_per_micro_batch * self.micro_batches

    @property
    def tokens_per_rank(self) -> int:
        """The tokens of a micro-batch of full rows that a rank has, the most of all ranks."""
        return -(-self.micro_batch_size * self.max_length // self.row_ranks)

    @property
    def recomputes(self) -> bool:
        """Whether the backward runs layers, or parts of them, a second time."""
        return self.checkpointing != "none"

    @property
    def keeps_inputs_alone(self) -> bool:
        """Whether layers keep nothing but their inputs until the backward."""
        return self.checkpointing in ("full", "offload")

    @property
    def weights_dtype(self) -> str:
        """The dtype of the weights that are read.

        A frozen weight is read in the compute dtype: each forward would cast more digits away.
        """
        return self.compute_dtype if self.is_lora else self.master_dtype

    @property
    def device_dtype(self) -> str:
        """The dtype of these weights on the device.

        FSDP2 would cast masters to the compute dtype before it gathers them: without masters the
        device needs no more digits.
        """
        is_narrower = BYTES[self.compute_dtype] < BYTES[self.master_dtype]
        return self.compute_dtype if self.offloads and is_narrower else self.weights_dtype

    @property
    def updated_dtype(self) -> str:
        """The dtype of trained weights on the device, adapters among them."""
        return self.master_dtype if self.is_lora else self.device_dtype

    @property
    def gradient_dtype(self) -> str:
        """The dtype of sharded gradients: of masters or of reduced ones, whichever is wider."""
        return max(self.master_dtype, self.reduce_dtype, key=lambda name: BYTES[name])

    @property
    def optimizer_bytes(self) -> float:
        """The bytes of the optimizer's states per element, in device or host memory."""
        from shardtune.optimizers.rules import find_rule  # and torch, which agents do not load

        return find_rule(self.optimizer, self.master_dtype).bytes_per_element(self.master_dtype)

    @property
    def host_master_bytes(self) -> int:
        """The bytes per element of masters in host memory; 0 where the device has all digits."""
        is_there = self.offloads and self.device_dtype != self.master_dtype
        return BYTES[self.master_dtype] * is_there

    @property
    def host_bytes(self) -> float:
        """The bytes of an element's master, states and gradient in host memory."""
        if not self.offloads:
            return 0
        return self.host_master_bytes + self.optimizer_bytes + BYTES[self.gradient_dtype]

    def in_flight(self, stage: int) -> int:
        """Return the most micro-batches of a stage that wait for their backward."""
        return min(self.stages - stage, self.micro_batches)

    def problems(self, nodes_of_ranks: Sequence[int] = ()) -> list[str]:
        """Return why the ranks cannot be divided, given the node of each rank where it is known.

        The ranks of a stage that share a row may have different shards, or replicas.
        """
        problems = dict[str, str]()
        for chain in _CHAINS:
            ranks, divided = self.ranks, ["world size"]
            for key in (f"parallel.{name}" for name in chain):
                parts = getattr(self, key.removeprefix("parallel."))
                if ranks % parts == 0:
                    ranks //= parts
                elif key not in problems:
                    whole = " / ".join(divided) if len(divided) > 1 else "the world size"
                    remedy = f"one of {divisors_text(ranks)}" if ranks > 1 else f"{key}=1"
                    if key == "parallel.tensor" and nodes_of_ranks:
                        remedy = f"{key}={self._nearest_tensor(ranks, nodes_of_ranks)}"
                    said = f"{key}={parts} does not divide {whole}, {ranks}"
                    problems[key] = f"{said} - use {remedy}"
                divided += [key] if key != "parallel.stages" or parts > 1 else []
        if self.tensor > 1 and self.context > 1:
            problems["both"] = (
                f"parallel.tensor={self.tensor} and parallel.context={self.context} both cut "
                "rows - use one of them"
            )
        return [*problems.values()] or [*filter(None, [self.split_by_nodes(nodes_of_ranks)])]

    @property
    def bubble(self) -> float:
        """The share of a step in which a stage has no micro-batch.

        It assumes that all stages take equally long (arXiv 2006.09503, section 2.2).
        """
        return (self.stages - 1) / (self.micro_batches + self.stages - 1)

    def split_by_nodes(self, nodes_of_ranks: Sequence[int]) -> str:
        """Return why a stage has some ranks of two nodes, not all of them, or why ranks of two
        nodes share matrices; else an empty text.

        Gathers and reductions would then cross nodes, where hidden states alone should.
        """
        if _is_split(nodes_of_ranks, self.stages):
            numbers = (n for n in range(1, self.ranks + 1) if self.ranks % n == 0)
            whole = [n for n in numbers if not _is_split(nodes_of_ranks, n)]
            nearest = min(whole, key=lambda n: abs(n - self.stages))
            return (
                f"parallel.stages={self.stages} puts a stage of {self.stage_ranks} ranks across "
                f"part of two nodes - use parallel.stages={nearest}"
            )
        if _crosses_nodes(nodes_of_ranks, self.tensor):
            nearest = self._nearest_tensor(self.shards, nodes_of_ranks)
            return (
                f"parallel.tensor={self.tensor} lets ranks of two nodes share matrices, so that "
                f"each layer waits for the network - use parallel.tensor={nearest}"
            )
        return ""

    def _nearest_tensor(self, ranks: int, nodes_of_ranks: Sequence[int]) -> int:
        """Return the largest divisor of `ranks` up to `tensor` whose groups stay within nodes."""
        degrees = (n for n in range(1, self.tensor + 1) if ranks % n == 0)
        return max(n for n in degrees if not _crosses_nodes(nodes_of_ranks, n))


def _is_split(nodes_of_ranks: Sequence[int], stages: int) -> bool:
    stage_ranks = max(1, len(nodes_of_ranks) // stages)
    for first in range(0, len(nodes_of_ranks), stage_ranks):
        inside = set(nodes_of_ranks[first : first + stage_ranks])
        outside = {*nodes_of_ranks[:first], *nodes_of_ranks[first + stage_ranks :]}
        if len(inside) > 1 and inside & outside:
            return True
    return False


def _crosses_nodes(nodes_of_ranks: Sequence[int], size: int) -> bool:
    firsts = range(0, len(nodes_of_ranks), size)
    return any(len(set(nodes_of_ranks[first : first + size])) > 1 for first in firsts)


def leaves_empty_slices(length: int, shards: int) -> bool:
    """Return whether FSDP2 leaves some of the shards without a row."""
    return -(-length // shards) * (shards - 1) >= length
