"""How a job is divided over ranks: degrees of parallelism, with checks that show their arithmetic.

>>> config = ParallelismConfig(dp=2, tp=2, pp=2)
>>> config.world_size
8
>>> config.check_world_size(6)
Traceback (most recent call last):
    ...
ValueError: dp 2 x pp 2 x cp 1 x tp 2 = 8, but there are 6 ranks
"""

from __future__ import annotations

from dataclasses import dataclass

from minidist.cost.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class ParallelismConfig:
    """Degrees of data, pipeline, context and tensor parallelism, and their options.

    The rank order is that of `minidist.mesh`: dp, pp, cp, tp from slowest to fastest axis.

    Attributes:
        zero_stage: 0 (replicate), 1 (shard optimiser states over dp and cp), 2 (also gradients), 3
            (also parameters; FSDP) (arXiv 1910.02054).
        sequence_parallel: shard along the sequence the activations that tensor parallelism does not
            shard (arXiv 2205.05198).
        virtual_stages: chunks of layers per pipeline rank (interleaved 1F1B, arXiv 2104.04473).
        ep: expert-parallel ranks. They are drawn from the dp * cp * tp ranks: ep of these share the
            experts of a block, so ep does not change the number of GPUs. With ep > 1 each expert is
            whole on its rank; without, tp cuts the experts, too (arXiv 2504.14960).
        replicas: copies of the shards of ZeRO (hybrid sharding, HSDP): dp * cp / replicas ranks,
            neighbours of each other, share one copy, and gradients are averaged over the copies.
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    zero_stage: int = 0
    sequence_parallel: bool = False
    virtual_stages: int = 1
    ep: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        for name in ("dp", "pp", "cp", "tp", "virtual_stages", "ep", "replicas"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"ParallelismConfig: {name} must be an integer >= 1, got {value!r}"
                )
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(
                f"ParallelismConfig: zero_stage is 0, 1, 2 or 3, got {self.zero_stage}"
            )
        if self.virtual_stages > 1 and self.pp == 1:
            raise ValueError(
                f"ParallelismConfig: {self.virtual_stages} virtual stages need pp > 1, got pp 1"
            )
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("ParallelismConfig: sequence_parallel needs tp > 1, got tp 1")
        ranks = self.dp * self.cp * self.tp
        if ranks % self.ep:
            raise ValueError(
                f"ParallelismConfig: dp {self.dp} x cp {self.cp} x tp {self.tp} = {ranks} ranks do "
                f"not divide into groups of ep {self.ep}"
            )
        if self.replicas > 1 and not self.zero_stage:
            raise ValueError(
                f"ParallelismConfig: {self.replicas} replicas of shards need a zero_stage >= 1, "
                "got 0: without shards all ranks are replicas"
            )
        if self.shard_ranks % self.replicas:
            raise ValueError(
                f"ParallelismConfig: dp {self.dp} x cp {self.cp} = {self.shard_ranks} ranks do "
                f"not divide into {self.replicas} replicas"
            )
        if ranks // self.ep % self.replicas:
            raise ValueError(
                f"ParallelismConfig: {ranks} ranks / ep {self.ep} = {ranks // self.ep} copies of "
                f"an expert do not divide into {self.replicas} replicas"
            )

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.cp * self.tp

    @property
    def model_ranks(self) -> int:
        """Ranks that together hold one copy of the model: tp * pp."""
        return self.tp * self.pp

    @property
    def shard_ranks(self) -> int:
        """Ranks that hold equal parameters, so that ZeRO can shard over these ranks: dp * cp."""
        return self.dp * self.cp

    @property
    def zero_ranks(self) -> int:
        """Ranks over which ZeRO shards: all that hold equal parameters, or with HSDP a part."""
        return self.shard_ranks // self.replicas

    def stride(self, axis: str) -> int:
        """Distance between neighbouring ranks of an axis: 1 for tp, tp for cp, ...

        >>> ParallelismConfig(dp=2, pp=4, tp=8).stride("dp")
        32
        """
        order = ("tp", "cp", "pp", "dp")
        stride = 1
        for name in order[: order.index(axis)]:
            stride *= getattr(self, name)
        return stride

    def __str__(self) -> str:
        parts = [f"{name} {getattr(self, name)}" for name in ("dp", "pp", "cp", "tp")]
        extra = [f"ZeRO-{self.zero_stage}"] if self.zero_stage else []
        extra += [f"{self.replicas} replicas"] if self.replicas > 1 else []
        extra += ["sequence parallel"] if self.sequence_parallel else []
        extra += [f"{self.virtual_stages} chunks per stage"] if self.virtual_stages > 1 else []
        extra += [f"ep {self.ep}"] if self.ep > 1 else []
        return " x ".join(parts) + (", " + ", ".join(extra) if extra else "")

    # ----------------------------------------------------------------------------------- checks

    def check_world_size(self, world_size: int) -> None:
        """Raises ValueError if the product of the degrees is not `world_size`."""
        if self.world_size != world_size:
            raise ValueError(
                f"dp {self.dp} x pp {self.pp} x cp {self.cp} x tp {self.tp} = {self.world_size}, "
                f"but there are {world_size} ranks"
            )

    def num_microbatches(self, *, global_batch: int, micro_batch: int) -> int:
        """Micro-batches of each pipeline per step: m = global batch / (dp * micro-batch).

        >>> ParallelismConfig(dp=4).num_microbatches(global_batch=64, micro_batch=2)
        8
        >>> ParallelismConfig(dp=3).num_microbatches(global_batch=64, micro_batch=2)
        Traceback (most recent call last):
            ...
        ValueError: global batch 64 = dp 3 x micro-batch 2 x 10 + 4: 4 sequences are left over
        """
        if global_batch < 1 or micro_batch < 1:
            raise ValueError(
                f"batches must be at least 1, got global {global_batch}, micro {micro_batch}"
            )
        count, left = divmod(global_batch, self.dp * micro_batch)
        if left:
            raise ValueError(
                f"global batch {global_batch} = dp {self.dp} x micro-batch {micro_batch} x {count} "
                f"+ {left}: {left} sequences are left over"
            )
        return count

    def problems(
        self,
        *,
        model: Transformer,
        global_batch: int | None = None,
        micro_batch: int = 1,
        gpus_per_node: int | None = None,
        even_stages: bool = True,
    ) -> list[str]:
        """The sizes that do not divide or fit, in words; empty if the configuration can run.

        Args:
            even_stages: False allows layers that do not divide by the stages, as some software
                does; every stage and chunk needs one, or the table, or the head.
        """
        found = []
        kv_heads = model.num_kv_heads or model.num_heads

        def divides(what: str, amount: int, axis: str, size: int) -> None:
            if amount % size:
                found.append(
                    f"{amount} {what} do not divide by {axis} = {size}: {amount} / {size} = "
                    f"{amount / size:.4g}"
                )

        divides("heads", model.num_heads, "tp", self.tp)
        if kv_heads != model.num_heads and kv_heads % self.tp and self.tp % kv_heads:
            found.append(
                f"{kv_heads} key-value heads and tp = {self.tp}: neither divides the other"
            )
        divides("columns of the width", model.width, "tp", self.tp)
        stages = self.pp * self.virtual_stages
        if even_stages:
            stage_word = "pp x chunks" if stages != self.pp else "pp"
            divides("layers", model.num_layers, stage_word, stages)
        elif stages > model.num_layers + 2:
            found.append(
                f"{model.num_layers} layers + the table + the head = {model.num_layers + 2} are "
                f"fewer than pp x chunks = {stages}"
            )
        divides(
            "tokens of context",
            model.context,
            "2 x cp" if self.cp > 1 else "cp",
            2 * self.cp if self.cp > 1 else 1,
        )
        if self.sequence_parallel:
            divides("tokens of context", model.context, "tp x cp", self.tp * self.cp)
        if self.ep > 1 and not model.num_experts:
            found.append(f"ep {self.ep}: the model has no experts")
        elif model.num_experts:
            divides("experts", model.num_experts, "ep", self.ep)
        if gpus_per_node is not None and self.tp > gpus_per_node:
            found.append(f"tp {self.tp} does not stay inside a node of {gpus_per_node} GPUs")
        elif gpus_per_node is not None and gpus_per_node % self.tp:
            found.append(f"tp {self.tp} groups do not tile a node of {gpus_per_node} GPUs")
        if self.zero_stage >= 2 and self.pp > 1:
            found.append(
                f"ZeRO-{self.zero_stage} with pp {self.pp}: it would reduce or gather again for "
                "every micro-batch"
            )
        if global_batch is not None:
            found += self._batch_problems(global_batch, micro_batch)
        return found

    def _batch_problems(self, global_batch: int, micro_batch: int) -> list[str]:
        try:
            m = self.num_microbatches(global_batch=global_batch, micro_batch=micro_batch)
        except ValueError as error:
            return [str(error)]
        if self.virtual_stages > 1 and m % self.pp:
            return [f"interleaving needs micro-batches {m} / pp {self.pp} whole"]
        return []

    def validate(
        self,
        *,
        world_size: int,
        model: Transformer | None = None,
        global_batch: int | None = None,
        micro_batch: int = 1,
        gpus_per_node: int | None = None,
    ) -> ParallelismConfig:
        """Returns itself, or raises a ValueError that lists everything that does not fit."""
        self.check_world_size(world_size)
        if model is not None:
            found = self.problems(
                model=model,
                global_batch=global_batch,
                micro_batch=micro_batch,
                gpus_per_node=gpus_per_node,
            )
            if found:
                raise ValueError(f"{self}: " + "; ".join(found))
        return self
