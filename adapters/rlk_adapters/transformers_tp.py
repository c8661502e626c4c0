"""transformers with native tensor parallelism, whose head leaves each rank its shard of the logits.

Letters: B sequences, S positions, R rows, L this rank's columns, V all columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlk_adapters.ranks import Ranks
from rlk_align.contract import VocabLayout, equal_shards
from rlk_align.errors import UnusableInput

HEAD = "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedModel:
    """One rank's part of a causal language model, in eval mode."""

    model: Any
    layout: VocabLayout
    ranks: Ranks

    @property
    def device(self) -> torch.device:
        """Where inputs go and logits come from."""
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and so of the logits."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def head_style(self) -> str:
        """Parallel style of the head; ``replicate`` where one rank holds it all."""
        style: str = self.model.tp_plan[HEAD] if self.ranks.size > 1 else "replicate"
        return style

    def shard_logits(self, token_ids_BS: torch.Tensor, is_token_BS: torch.Tensor) -> torch.Tensor:
        """This rank's logits of right-padded sequences; collective.

        Returns:
            ``[B, S, L]`` in the model's dtype, as the head computed them.

        Raises:
            RuntimeError: If they are not this rank's columns in the model's dtype.
        """
        with torch.no_grad():
            logits_BSL: torch.Tensor = self.model(
                input_ids=token_ids_BS.to(self.device),
                attention_mask=is_token_BS.to(self.device),
                use_cache=False,
            ).logits
        start, end = self.layout.bounds[self.ranks.rank]
        if logits_BSL.shape[-1] != end - start or logits_BSL.dtype != self.dtype:
            raise RuntimeError(
                f"the head gave {logits_BSL.shape[-1]} columns in {logits_BSL.dtype}, but this "
                f"rank holds [{start}, {end}) in {self.dtype}; this version of transformers or "
                "this model treats the head in another way"
            )
        return logits_BSL

    def gathered(self, logits_RL: torch.Tensor) -> torch.Tensor:
        """``[R, V]``: every rank's columns side by side, as a trainer gathers them; collective."""
        if self.ranks.size == 1:
            return logits_RL
        widths = [end - start for start, end in self.layout.bounds]
        # ranks send tensors of one shape; the last shards may be narrower than the first
        sent = torch.nn.functional.pad(logits_RL, (0, max(widths) - logits_RL.shape[1]))
        shards = [torch.empty_like(sent) for _ in widths]
        dist.all_gather(shards, sent)
        return torch.cat([s[:, :width] for s, width in zip(shards, widths, strict=True)], dim=1)


def read_config(directory: Path) -> Any:
    """The transformers config of a checkpoint.

    Raises:
        UnusableInput: If there is none, or it is not one of a causal language model.
    """
    try:
        from transformers import AutoConfig  # an optional dependency
    except ImportError as error:
        raise UnusableInput(f"{error}; run: pip install 'rlk-align[trainer]'") from None
    if not (directory / "config.json").is_file():
        raise UnusableInput(f"{directory}: no config.json; give a Hugging Face checkpoint")
    try:
        config = AutoConfig.from_pretrained(directory)
    except (ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UnusableInput(
            f"{directory}/config.json: transformers refuses it ({reason})"
        ) from None
    _model_class(config)
    return config


def check_tensor_parallel(config: Any, tp_size: int) -> None:
    """Whether the model splits over ``tp_size`` ranks.

    Raises:
        UnusableInput: If heads do not divide, or the model has no plan.
    """
    if tp_size == 1:
        return
    for field in ("num_attention_heads", "num_key_value_heads"):
        if getattr(config, field, tp_size) % tp_size:
            raise UnusableInput(
                f"the model has {field} {getattr(config, field)}, which {tp_size} ranks do not "
                "divide; start as many ranks as divide it"
            )
    if HEAD not in full_tp_plan(config) or not config.base_model_tp_plan:
        raise UnusableInput(
            f"{_model_class(config).__name__} has no tensor-parallel plan in this version of "
            "transformers; replay with one process"
        )


def full_tp_plan(config: Any) -> dict[str, str]:
    """The model's own plan with a head that does not gather.

    Always the whole plan: transformers 5.16 takes a dict for all of it, 5.19 merges it in.
    """
    model_class = _model_class(config)
    base = config.base_model_tp_plan or {}
    plan = {f"{model_class.base_model_prefix}.{name}": style for name, style in base.items()}
    plan |= model_class._tp_plan or {}
    return plan | {name: "colwise" for name in plan if name == HEAD}


def load_model(
    directory: Path, config: Any, *, ranks: Ranks, dtype: torch.dtype | None
) -> ShardedModel:
    """This rank's part of the checkpoint; collective.

    Args:
        directory: A Hugging Face checkpoint.
        config: Its `read_config`.
        ranks: All of them make one tensor-parallel group.
        dtype: To load the weights in; None is the checkpoint's.
    """
    from transformers import logging  # an optional dependency

    logging.disable_progress_bar()
    placement: dict[str, Any] = {}
    if ranks.size > 1:
        from transformers.distributed import DistributedConfig

        placement["distributed_config"] = DistributedConfig(
            tp_size=ranks.size, tp_plan=full_tp_plan(config)
        )
    elif torch.cuda.is_available():
        placement["device_map"] = "cuda"
    model = _model_class(config).from_pretrained(directory, dtype=dtype or "auto", **placement)
    if ranks.size > 1:
        _limit_waiting(model, ranks)
    layout = equal_shards(config.vocab_size, ranks.size)
    return ShardedModel(model=model.eval(), layout=layout, ranks=ranks)


def _model_class(config: Any) -> Any:
    import transformers  # an optional dependency

    names = config.architectures or []
    found = getattr(transformers, names[0], None) if names else None
    if found is None:
        raise UnusableInput(
            f"config.json names the architectures {names}; transformers "
            f"{transformers.__version__} has no such model"
        )
    return found


def _limit_waiting(model: Any, ranks: Ranks) -> None:
    # a mesh makes groups with a timeout of its own; torch has no public way to set it afterwards
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(ranks.timeout, model._device_mesh.get_group("tp"))
