"""Divergences keep their digits down to bf16 noise and do not depend on either side's layout."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_fixtures.logits import QWEN3_VOCAB_SIZE, benign_rows
from rlk_kernels import expsum_state, sum_state
from rlk_kernels.divergence import DivergenceSum, PairStatus, divergence

VALUES = ("kl_pq", "kl_qp", "js", "tv")
FIELDS = (*VALUES, "kl_pq_is_infinite", "kl_qp_is_infinite", "status")
# an exponential errs by 1.5 units of 2**-24 (9e-8), in the column and in both rows' sums
RELATIVE = 6e-7
# half the square of what the two LSEs may err
ABSOLUTE = 1e-13
# differences of probabilities keep the exponentials' own error
TV_ABSOLUTE = 1e-7


def random_rows(seed: int, num_tokens: int, vocab_size: int, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(num_tokens, vocab_size, generator=generator)


def masked_rows(seed: int, num_tokens: int, vocab_size: int) -> torch.Tensor:
    z = random_rows(seed, num_tokens, vocab_size)
    masked = torch.rand(z.shape, generator=torch.Generator().manual_seed(seed + 1)) < 0.05
    masked[:, 0] = False
    return z.masked_fill(masked, -torch.inf)


def truth(p_logits: torch.Tensor, q_logits: torch.Tensor) -> dict[str, np.ndarray]:
    """In long double, every term at least 0 so that near-equal rows keep their digits."""
    p_log, q_log = (_log_softmax(x) for x in (p_logits, q_logits))
    m_log = np.logaddexp(p_log, q_log) - np.log(np.longdouble(2))
    p, q = np.exp(p_log), np.exp(q_log)
    to_mean = (_kl_terms(p, p_log - m_log) + _kl_terms(q, q_log - m_log)).sum(1)
    return {
        "kl_pq": _kl_terms(p, p_log - q_log).sum(1),
        "kl_qp": _kl_terms(q, q_log - p_log).sum(1),
        "js": to_mean / 2,
        "tv": np.abs(p - q).sum(1) / 2,
    }


def _log_softmax(logits: torch.Tensor) -> np.ndarray:
    z = logits.double().numpy().astype(np.longdouble)
    z = z - z.max(1, keepdims=True)
    return z - np.log(np.exp(z).sum(1, keepdims=True))


def _kl_terms(p: np.ndarray, d: np.ndarray) -> np.ndarray:
    return p * (d + np.expm1(-d))


def check(p_logits: torch.Tensor, q_logits: torch.Tensor) -> None:
    vocab_size = p_logits.shape[1]
    ours = divergence([(0, p_logits)], [(0, q_logits)], vocab_size=vocab_size)
    right = truth(p_logits, q_logits)
    for name in VALUES:
        absolute = TV_ABSOLUTE if name == "tv" else ABSOLUTE
        np.testing.assert_allclose(
            getattr(ours, name), right[name], RELATIVE, absolute, err_msg=name
        )
    assert not ours.status.any()


@pytest.mark.parametrize("noise", [1e-6, 1e-4, 1e-2, 0.3, 3.0])
@pytest.mark.parametrize("scale", [0.1, 3.0, 15.0])
@pytest.mark.parametrize("vocab_size", [2, 300])
def test_divergences_are_right_from_noise_to_unrelated(vocab_size, scale, noise) -> None:
    p = random_rows(0, 300, vocab_size, scale)
    check(p, p + noise * random_rows(1, 300, vocab_size, 1.0))


def test_bf16_noise_on_real_rows_keeps_its_digits() -> None:
    rows = benign_rows(3, seed=1)
    noisy = rows + 0.004 * random_rows(0, 3, QWEN3_VOCAB_SIZE, 1.0)
    p, q = rows.bfloat16(), noisy.bfloat16()
    ours = divergence([(0, p)], [(0, q)], vocab_size=QWEN3_VOCAB_SIZE)
    right = truth(p, q)
    for name in ("kl_pq", "kl_qp", "js"):
        np.testing.assert_allclose(getattr(ours, name), right[name], rtol=1e-6)
    np.testing.assert_allclose(ours.tv, right["tv"], rtol=1e-4)
    assert ours.kl_pq.min() < 1e-5
    # the usual sum of p log(p / q) in float32
    p_log, q_log = (torch.log_softmax(x.float(), 1) for x in (p, q))
    usual = (p_log.exp() * (p_log - q_log)).sum(1).double().numpy()
    assert np.abs(usual / right["kl_pq"] - 1).max() > 1e-5


def test_equal_rows_diverge_by_nothing() -> None:
    p = masked_rows(0, 5, 200)
    ours = divergence([(0, p)], [(0, p[:, :80]), (80, p[:, 80:])], vocab_size=200)
    for name in FIELDS:
        assert not getattr(ours, name).any(), name


def test_a_shifted_row_is_the_same_distribution() -> None:
    p = (random_rows(0, 20, 200) * 256).round() / 256
    ours = divergence([(0, p)], [(0, p + 100)], vocab_size=200)
    assert max(ours.kl_pq.max(), ours.kl_qp.max(), ours.js.max()) < ABSOLUTE
    assert ours.tv.max() < TV_ABSOLUTE


def test_disjoint_rows_are_as_far_apart_as_can_be() -> None:
    p, q = random_rows(0, 9, 400), random_rows(1, 9, 400)
    p[:, ::2], q[:, 1::2] = -torch.inf, -9000.0
    ours = divergence([(0, p)], [(0, q)], vocab_size=400)
    np.testing.assert_allclose(ours.tv, 1.0, rtol=1e-7)
    np.testing.assert_allclose(ours.js, np.log(2), rtol=1e-7)
    assert ours.tv.max() <= 1
    assert ours.js.max() <= np.log(2)
    assert ours.kl_pq_is_infinite.all()
    assert ours.kl_qp_is_infinite.all()
    assert not ours.kl_pq.any()
    assert not ours.status.any()


def test_one_sided_masks_make_one_kl_infinite() -> None:
    p = random_rows(0, 4, 100)
    q = p.clone()
    q[1:3, 10:20] = -torch.inf
    ours = divergence([(0, p)], [(0, q)], vocab_size=100)
    assert ours.kl_pq_is_infinite.tolist() == [False, True, True, False]
    assert not ours.kl_qp_is_infinite.any()
    # q is p without some columns: KL(q || p) = -log of the mass that is left
    left = torch.softmax(p.double(), 1).masked_fill(q == -torch.inf, 0).sum(1)
    np.testing.assert_allclose(ours.kl_qp, -left.log(), RELATIVE, 1e-13)
    np.testing.assert_allclose(ours.tv, 1 - left, RELATIVE, TV_ABSOLUTE)


def test_far_logits_stay_finite() -> None:
    p, q = torch.tensor([[8192.0, -8191.0]]), torch.tensor([[-8191.0, 8192.0]])
    ours = divergence([(0, p)], [(0, q)], vocab_size=2)
    assert ours.kl_pq.tolist() == ours.kl_qp.tolist() == [16383.0]
    assert ours.tv.tolist() == [1.0]
    assert not ours.kl_pq_is_infinite.any()


def test_unusable_rows_have_a_status() -> None:
    p, q = torch.zeros(5, 6), torch.zeros(5, 6)
    p[0, 2], q[1, 3] = torch.nan, 9000.0
    p[2], q[3] = -torch.inf, -torch.inf
    q[0] = -torch.inf
    ours = divergence([(0, p)], [(0, q)], vocab_size=6)
    assert ours.status.tolist() == [
        PairStatus.P_UNUSABLE,
        PairStatus.Q_UNUSABLE,
        PairStatus.P_UNUSABLE,
        PairStatus.Q_UNUSABLE,
        PairStatus.OK,
    ]
    for name in FIELDS[:-1]:
        assert not getattr(ours, name).any(), name


def random_shards(random, logits: torch.Tensor, vocab_size: int) -> list[tuple[int, torch.Tensor]]:
    """The row cut anywhere, with empty shards and poisoned padding, in any order."""
    cuts = sorted(random.choices(range(vocab_size + 1), k=random.randint(0, 4)))
    bounds = list(zip([0, *cuts], [*cuts, vocab_size], strict=True))
    shards = [(start, logits[:, start:end]) for start, end in bounds]
    padding = torch.full((len(logits), 5), torch.nan, dtype=logits.dtype)
    shards[-1] = (shards[-1][0], torch.cat([shards[-1][1], padding], 1))
    random.shuffle(shards)
    return shards


@given(
    st.integers(0, 10**6),
    st.randoms(use_true_random=False),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([1.0, 0.7]),
)
@settings(max_examples=30, deadline=None)
def test_no_layout_tile_batch_or_swap_moves_a_bit(seed, random, dtype, temperature) -> None:
    num_tokens, vocab_size = random.randint(1, 3), random.choice([1, 9, 80])
    p = masked_rows(seed, num_tokens, vocab_size).to(dtype)
    q = p.float() + random.choice([1e-3, 2.0]) * random_rows(seed + 2, num_tokens, vocab_size, 1)
    size = {"vocab_size": vocab_size}
    whole = divergence([(0, p)], [(0, q)], p_temperature=temperature, **size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sum_state, "TILE_ELEMENTS", random.choice([7, 50, 1 << 14]))
        cut = divergence(
            random_shards(random, p, vocab_size),
            random_shards(random, q, vocab_size),
            p_temperature=temperature,
            **size,
        )
    swapped = divergence([(0, q)], [(0, p)], q_temperature=temperature, **size)
    last = divergence([(0, p[-1:])], [(0, q[-1:])], p_temperature=temperature, **size)
    for name in FIELDS:
        ours = getattr(whole, name)
        assert torch.equal(ours, getattr(cut, name)), name
        assert torch.equal(ours[-1:], getattr(last, name)), name
        other = {"pq": "qp", "qp": "pq"}.get(name[3:5], "")
        mirrored = name.replace(name[3:5], other) if other else name
        assert torch.equal(ours, getattr(swapped, mirrored)), name


def states(p: torch.Tensor, q: torch.Tensor):
    ids = torch.zeros(len(p), dtype=torch.int64)
    return [expsum_state(x, token_ids=ids, vocab_size=x.shape[1]) for x in (p, q)]


def test_sums_of_parts_merge() -> None:
    p, q = random_rows(0, 4, 90), random_rows(5, 4, 90)
    # seen by one part each
    q[0, 60], p[2, 30] = -torch.inf, -torch.inf
    whole = divergence([(0, p)], [(0, q)], vocab_size=90)
    parts = [DivergenceSum(*states(p, q), vocab_size=90) for _ in range(3)]
    for number, (start, end) in enumerate([(50, 90), (0, 20), (20, 49), (49, 50)]):
        parts[number % 3].add(p[:, start:end], q[:, start:end], vocab_start=start)
    parts[1].merge(parts[2])
    parts[1].merge(parts[0])
    ours = parts[1].finish()
    for name in FIELDS:
        assert torch.equal(getattr(ours, name), getattr(whole, name)), name


def test_what_does_not_match_is_refused() -> None:
    p, q = random_rows(0, 2, 10), random_rows(1, 2, 10)
    pair = DivergenceSum(*states(p, q), vocab_size=10)
    pair.add(p[:, :6], q[:, :6], vocab_start=0)
    with pytest.raises(ValueError, match=r"token ids \[6, 10\) were not fed"):
        pair.finish()
    with pytest.raises(ValueError, match=r"token ids \[5, 6\) were fed twice"):
        pair.add(p[:, 5:], q[:, 5:], vocab_start=5)
    with pytest.raises(ValueError, match="the same columns"):
        pair.add(p[:, 6:], q[:, 7:], vocab_start=6)
    with pytest.raises(ValueError, match="one per row of the logits"):
        pair.add(p[:1, 6:], q[:1, 6:], vocab_start=6)
    with pytest.raises(ValueError, match="the same rows, got 2 and 1"):
        divergence([(0, p)], [(0, q[:1])], vocab_size=10)
    with pytest.raises(ValueError, match=r"Q: token ids \[8, 10\) were not fed"):
        divergence([(0, p)], [(0, q[:, :8])], vocab_size=10)
    with pytest.raises(ValueError, match=r"P: token ids \[3, 5\) were fed twice"):
        divergence([(0, p[:, :5]), (3, p[:, 3:])], [(0, q)], vocab_size=10)
    with pytest.raises(ValueError, match="P has no shard"):
        divergence([], [(0, q)], vocab_size=10)
    with pytest.raises(ValueError, match="only divergences of the same rows"):
        pair.merge(DivergenceSum(*states(p[:1], q[:1]), vocab_size=10))


def test_columns_of_other_rows_than_the_states_are_refused() -> None:
    p, q = random_rows(0, 3, 10), random_rows(1, 3, 10)
    for call, message in (
        ((p, q + torch.tensor([[0.0], [0.01], [0.0]])), "Q, row 1: the columns fed have a"),
        ((p.flip(0), q), "P, row 0: the columns fed have a probability of"),
        ((p + 4000, q), "P, row 0: "),
    ):
        pair = DivergenceSum(*states(p, q), vocab_size=10)
        pair.add(*call, vocab_start=0)
        with pytest.raises(ValueError, match=message):
            pair.finish()
    pair = DivergenceSum(*states(p, q), vocab_size=10, q_temperature=0.9)
    pair.add(p, q, vocab_start=0)
    with pytest.raises(ValueError, match=r"Q, row 0: .* pass the temperature"):
        pair.finish()
