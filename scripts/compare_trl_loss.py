"""Our GRPO loss next to trl's own `GRPOTrainer._compute_loss`, both against trl's in float64.

trl is no dependency of ours; install it where this runs (read and run against 1.16.0). Its method
is called on the logprobs of seeded logits, with a stand-in for the rest of the trainer. Its
loss_type grpo is our sequence_mean, bnpo our active_tokens, dr_grpo our constant.
"""

import json
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlk_align.contract import LogprobContract, MaskContract, ShardingContract, equal_shards
from rlk_align.loss import GrpoLoss, LossContract, SequenceTable, TokenRows, grpo_loss

VOCAB_SIZE = 151936
SEQUENCES, LENGTH = 4, 32
CLIP_LOW, CLIP_HIGH, KL_WEIGHT = 0.2, 0.28, 0.04
LOSS_TYPES = {"grpo": "sequence_mean", "bnpo": "active_tokens", "dr_grpo": "constant"}


def seeded_batch() -> dict[str, Tensor]:
    """Peaked logits [S, N, V] with likely tokens, logprobs of a nearby policy, mask and rewards."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(SEQUENCES, LENGTH, VOCAB_SIZE, generator=generator)
    ids = torch.randint(0, VOCAB_SIZE, (SEQUENCES, LENGTH), generator=generator)
    logits.scatter_add_(2, ids[..., None], torch.full((SEQUENCES, LENGTH, 1), 12.0))
    logprob = selected(logits.double(), ids)
    noise = torch.randn(2, SEQUENCES, LENGTH, generator=generator) * 0.2
    return {
        "logits": logits,
        "ids": ids,
        "old": (logprob + noise[0]).float(),
        "reference": (logprob + noise[1]).float(),
        "mask": torch.arange(LENGTH) < torch.tensor([32, 7, 20, 29])[:, None],
        "rewards": torch.tensor([1.0, 0.0, 0.25, 1.0]),
    }


def selected(logits: Tensor, ids: Tensor) -> Tensor:
    """Logprob of each id, in the logits' dtype."""
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def our_loss(batch: dict[str, Tensor], logits: Tensor, normalizer: str) -> GrpoLoss:
    """The loss of the whole batch in one process."""
    mask = batch["mask"].flatten()
    contract = LogprobContract(
        role="train",  # type: ignore[arg-type]  # enums take their strings
        logits_dtype="fp32",  # type: ignore[arg-type]
        sharding=ShardingContract(layout=equal_shards(VOCAB_SIZE, 1)),
        mask=MaskContract(num_tokens=len(mask), active=tuple(mask.tolist())),
    )
    settings: dict[str, Any] = {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH}
    settings |= {"kl": "k3", "kl_weight": KL_WEIGHT, "normalizer": normalizer}
    if normalizer == "constant":
        settings["constant"] = float(SEQUENCES * LENGTH)
    return grpo_loss(
        lambda: LossContract(logprob=contract, **settings),
        logits.flatten(0, 1),
        batch["ids"].flatten(),
        TokenRows(
            sequence_ids_T=torch.arange(SEQUENCES).repeat_interleave(LENGTH),
            old_logprob_T=batch["old"].flatten(),
            ref_logprob_T=batch["reference"].flatten(),
        ),
        SequenceTable(
            ids=torch.arange(SEQUENCES),
            group_ids=torch.zeros(SEQUENCES, dtype=torch.int64),
            rewards=batch["rewards"],
            num_active=batch["mask"].sum(1),
        ),
        backend="expsum-cpu",
    )


def trl_loss(
    batch: dict[str, Tensor], logits: Tensor, loss_type: str, advantages: Tensor
) -> Tensor:
    """What trl's method makes of the same, in the logits' dtype."""
    # optional, and heavy
    from trl.trainer.grpo_trainer import GRPOTrainer  # type: ignore[import-not-found]

    logprob = selected(logits, batch["ids"])
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprob, 0 * logprob, None),
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, **_: x),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None),
        aux_loss_enabled=False,
        beta=KL_WEIGHT,
        current_gradient_accumulation_steps=1,
        epsilon_high=CLIP_HIGH,
        epsilon_low=CLIP_LOW,
        importance_sampling_level="token",
        loss_type=loss_type,
        max_completion_length=LENGTH,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    nothing = torch.zeros(SEQUENCES, 0, dtype=torch.int64)
    inputs = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": batch["ids"],
        "completion_mask": batch["mask"].to(logits.dtype),
        "advantages": advantages.to(logits.dtype),
        "old_per_token_logps": batch["old"].to(logits.dtype),
        "ref_per_token_logps": batch["reference"].to(logits.dtype),
    }
    loss: Tensor = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss


def compare(batch: dict[str, Tensor], loss_type: str, normalizer: str) -> dict[str, Any]:
    """How far ours and trl's in float32 are from trl's in float64."""
    leaves = [batch["logits"].to(d, copy=True).requires_grad_() for d in PRECISIONS]
    ours = our_loss(batch, leaves[0], normalizer)
    losses = [ours.loss]
    losses += [trl_loss(batch, leaf, loss_type, ours.advantage_S) for leaf in leaves[1:]]
    for loss in losses:
        loss.backward()
    ours_grad, trl_grad, truth = (leaf.grad.double() for leaf in leaves if leaf.grad is not None)
    scale = float(truth.abs().max())
    return {
        "loss_type": loss_type,
        "loss": float(losses[2]),
        "loss_error_ours": abs(float(losses[0]) - float(losses[2])),
        "loss_error_trl": abs(float(losses[1]) - float(losses[2])),
        "gradient_error_ours": float((ours_grad - truth).abs().max()) / scale,
        "gradient_error_trl": float((trl_grad - truth).abs().max()) / scale,
    }


PRECISIONS = (torch.float32, torch.float32, torch.float64)
"""Of ours, of trl's, and of trl's that both are held against."""

if __name__ == "__main__":
    seeded = seeded_batch()
    for name, ours in LOSS_TYPES.items():
        print(json.dumps(compare(seeded, name, ours)))
